"""One request from its prompt to its last token: what comes in is a `Request`, what comes out are events."""

from everwarm.generation.ahead import Ahead
from everwarm.generation.generation import Generation
from everwarm.generation.request import Drafter, Message, Point, Request
from everwarm.generation.runtime import Runtime

__all__ = ["Ahead", "Drafter", "Generation", "Message", "Point", "Request", "Runtime"]
