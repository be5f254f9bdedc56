"""A module that the server of ranks must not import."""

import threading
import time

threading.Thread(target=time.sleep, args=(1000.0,), daemon=True).start()
