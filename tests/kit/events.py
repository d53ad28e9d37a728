"""A sink that keeps the events it is given."""

from node.observability.events import Event


class KeptEvents:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def emit(self, event: Event) -> None:
        self.events.append(event)
