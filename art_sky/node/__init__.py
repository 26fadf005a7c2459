"""What runs on a rented machine around the server: watchdog, guard, ledger.

Standard library only, for Python 3.9 and newer, importable straight from the wheel: it runs before anything is
installed and goes on when everything else hangs. Only `ledger` needs the installed package; it is a process of its own.
"""
