"""Runs rdma-core's Python tests, each told in a line of Rust's test harness.

A test that crashes or hangs costs itself and no other: the tests run in a child, and the next
child goes on behind the one that broke. `outcome.rs` reads the lines.

Usage: runner.py DIRECTORY FILTER KNOWN [options of the tests]

KNOWN names, as JSON, the tests that are known to fail, each with what it says when it does.
"""

import faulthandler
import json
import os
import random
import signal
import sys
import unittest
from importlib.machinery import SourceFileLoader

SECONDS_PER_TEST = 120


class Lines(unittest.TestResult):
    """Prints a test's line when it ends and keeps what went wrong for the end of the run."""

    def __init__(self, known, progress):
        super().__init__()
        self.known = known
        self.progress = progress
        self.said = None

    def startTest(self, test):
        super().startTest(test)
        self.said = None
        # The tests draw queue sizes and flags; each draws the same in every run.
        random.seed(test.id())
        faulthandler.dump_traceback_later(SECONDS_PER_TEST, exit=True)

    def stopTest(self, test):
        super().stopTest(test)
        faulthandler.cancel_dump_traceback_later()
        say(test.id(), self.said or "ok")
        os.write(self.progress, b".")

    def broken(self, test, problem):
        text = self._exc_info_to_string(problem, test)
        says = self.known.get(test.id())
        if says and says in text and self.said != "FAILED":
            self.said = "ignored, known to fail: " + says
            return
        self.said = "FAILED"
        with open("/tmp/failures", "a") as failures:
            failures.write(f"---- {test.id()} ----\n{text}\n")

    def addError(self, test, err):
        if isinstance(test, unittest.TestCase):
            self.broken(test, err)
        else:
            # A class or module that could not be set up; its tests do not run.
            print(test.id(), self._exc_info_to_string(err, test), file=sys.stderr, flush=True)

    def addFailure(self, test, err):
        self.broken(test, err)

    def addSubTest(self, test, subtest, err):
        if err is not None:
            self.broken(test, err)

    def addSkip(self, test, reason):
        self.said = "ignored, " + " ".join(str(reason).split())

    def addUnexpectedSuccess(self, test):
        self.said = "FAILED"


def say(name, outcome):
    # In one write, for the tests' own processes print as well.
    os.write(1, f"test {name} ... {outcome}\n".encode())


def flat(suite):
    for item in suite:
        if isinstance(item, unittest.TestSuite):
            yield from flat(item)
        else:
            yield item


def run(tests, known, progress):
    result = Lines(known, progress)
    unittest.TestSuite(tests).run(result)


def main():
    directory, pattern, known = sys.argv[1:4]
    known = json.loads(known)
    sys.argv[1:4] = []
    sys.path.insert(0, directory)
    module = SourceFileLoader("tests", os.path.join(directory, "__init__.py")).load_module()
    sys.modules["args_parser"].parser.parse_args()
    tests = list(flat(unittest.defaultTestLoader.loadTestsFromModule(module)))
    tests = [test for test in tests if pattern in test.id()]
    print(f"{len(tests)} tests", file=sys.stderr, flush=True)
    while tests:
        finished, progress = os.pipe()
        child = os.fork()
        if child == 0:
            os.setpgid(0, 0)
            os.close(finished)
            run(tests, known, progress)
            sys.stdout.flush()
            os._exit(0)
        os.close(progress)
        # Their own processes keep the pipe open, so the child's end is what counts.
        _, status = os.waitpid(child, 0)
        os.set_blocking(finished, False)
        done = b""
        try:
            done = os.read(finished, len(tests))
        except BlockingIOError:
            pass
        os.close(finished)
        try:
            os.killpg(child, signal.SIGKILL)
        except ProcessLookupError:
            pass
        tests = tests[len(done):]
        if tests and status == 0:
            print(f"{len(tests)} tests did not start", file=sys.stderr, flush=True)
            return 1
        if tests:
            say(tests[0].id(), "FAILED")
            how = f"it broke off or took over {SECONDS_PER_TEST} s (wait status {status})"
            with open("/tmp/failures", "a") as failures:
                failures.write(f"---- {tests[0].id()} ----\n{how}\n")
            tests = tests[1:]
    if os.path.exists("/tmp/failures"):
        with open("/tmp/failures") as failures:
            os.write(1, b"\nfailures:\n\n" + failures.read().encode() + b"\nfailures:\n")
    return 0


sys.exit(main())
