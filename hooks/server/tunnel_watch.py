"""``python tunnel_watch.py PROGRAM ...``: a child process that ends when standard input is closed.

A server that is killed cannot end what it started; its end of the pipe is closed all the same. Only the standard
library is imported, so that this starts quickly and without the packages of the server.
"""

import os
import subprocess
import sys
import threading

END_TIMEOUT = 5.0  # seconds between asking and killing


def main() -> None:
    """Run the program; exit as it does."""
    try:
        program = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
    except OSError as error:
        sys.stderr.write(f"{sys.argv[1]}: {error.strerror}\n")
        sys.exit(127)

    def end_with_the_server() -> None:
        while os.read(0, 1024):
            pass
        program.terminate()
        try:
            program.wait(END_TIMEOUT)
        except subprocess.TimeoutExpired:
            program.kill()

    threading.Thread(target=end_with_the_server, daemon=True).start()
    status = program.wait()
    os._exit(status if status >= 0 else 128 - status)


if __name__ == "__main__":
    main()
