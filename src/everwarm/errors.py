"""Every error that everwarm raises on purpose.

    EverwarmError
    ├── GGUFError        the model file is not what the format says
    ├── PackError        a pack is not what it should be; it is built again
    ├── ModelError       a sound file that we can't run (architecture, shapes, tensor types)
    ├── TokenizerError   the file's vocabulary or pre-tokenizer
    ├── TemplateError    the file's chat template, or messages that it refuses
    ├── RequestError     what the caller asked for (prompt, sampling, limits)
    │   └── ContextError
    ├── CapacityError    the KV budget is taken
    ├── CancelledError   nobody waits for the answer any more
    ├── StoreError       the agent store: its directory, its lock, an agent's name, an import
    │   ├── UnknownAgentError
    │   ├── TurnLostError    another replica has the agent's turn: ask again
    │   └── AgentExistsError
    ├── ConfigError      flags, variables, settings
    └── PullError        fetching a model

A message says what, where, which limit, and what to do next. The command line prints it as one line and exits with 2.
"""


class EverwarmError(Exception):
    """Base of all of them; catching it catches nothing that is a bug."""


class GGUFError(EverwarmError):
    """The model file is not what the GGUF format says it should be."""


class PackError(EverwarmError):
    """A pack is truncated, altered, or of other weights or another layout."""


class ModelError(EverwarmError):
    """A sound file that describes a model we can't run."""


class TokenizerError(EverwarmError):
    """The file's vocabulary, merges or pre-tokenizer can't be used."""


class TemplateError(EverwarmError):
    """The chat template is missing or broken, or refuses these messages."""


class RequestError(EverwarmError):
    """The caller asked for something impossible: an empty prompt, a negative temperature, too many tokens."""


class ContextError(RequestError):
    """More tokens than the model, or the limit that was set, can take."""


class CapacityError(EverwarmError):
    """No room for another block of keys and values: everything in the budget is in use."""


class StoreError(EverwarmError):
    """The agent store can't do this: who holds its lock, which agent, which file."""


class CancelledError(EverwarmError):
    """Whoever asked has gone, or has said that nothing more is wanted."""


class UnknownAgentError(StoreError):
    """There is no agent of this name."""


class TurnLostError(StoreError):
    """Another process has taken over this agent's turn. Nothing was saved; the request can be sent again."""


class AgentExistsError(StoreError):
    """There is an agent of this name already."""


class ConfigError(EverwarmError):
    """A flag, variable or setting that can't be understood."""


class PullError(EverwarmError):
    """A model could not be fetched; nothing half-written was left behind."""
