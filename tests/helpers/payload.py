"""What a malicious file holds."""


class Payload:
    """Calls a function when it is unpickled."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call
