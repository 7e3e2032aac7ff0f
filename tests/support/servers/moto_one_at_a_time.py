"""moto's server, whose conditional writes are one at a time, as a real service's are.

moto looks whether a key is taken and then writes it, in as many threads as there are requests: two
writers of one key can both find it free.
"""

import threading

from moto import server

_writes = threading.Lock()


class OneAtATime(server.DomainDispatcherApplication):
    """The same application; a request with a condition waits for the one before it."""

    def __call__(self, environ, start_response):
        if "HTTP_IF_NONE_MATCH" not in environ:
            return super().__call__(environ, start_response)
        with _writes:
            return super().__call__(environ, start_response)


if __name__ == "__main__":
    server.DomainDispatcherApplication = OneAtATime
    server.main()
