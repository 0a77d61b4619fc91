"""One request from its prompt to its last token: what comes in is a `Request`, what comes out are events."""

from everwarm.engine.drafts.proposer import Drafter
from everwarm.generation.ahead import Ahead
from everwarm.generation.generation import Generation
from everwarm.generation.request import Message, Point, Request
from everwarm.generation.runtime import Runtime

__all__ = ["Ahead", "Drafter", "Generation", "Message", "Point", "Request", "Runtime"]
