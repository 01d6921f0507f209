"""What ssh's failures mean, from what OpenSSH 9.2 really wrote (recorded)."""

import pytest

from hvdtrain.launch.remote.ssh import SshOptions, command_for, explain, is_local

OPTIONS = SshOptions(port=12345)
PYTHON = "/opt/hvdtrain/bin/python"
CHANGED = """@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@
@    WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED!     @
@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@@
IT IS POSSIBLE THAT SOMEONE IS DOING SOMETHING NASTY!
Add correct host key in /var/lib/hvdtrain-ssh/known_hosts to get rid of this message.
Offending ED25519 key in /var/lib/hvdtrain-ssh/known_hosts:3
Host key for [host3]:12345 has changed and you have requested strict checking.
Host key verification failed.
"""


UNKNOWN = """No ED25519 host key is known for [host3]:12345 and you have requested strict checking.
Host key verification failed."""
DENIED = """Load key "/keys/id": error in libcrypto
hvdtrain@host3: Permission denied (publickey)."""
CONNECT = "ssh: connect to host host3 port 12345:"


@pytest.mark.parametrize(
    ("status", "stderr", "kind", "parts"),
    [
        (255, "ssh: Could not resolve hostname host3: Name or service not known", "name", ["host3", "not resolve"]),
        (255, f"{CONNECT} Connection refused", "refused", ["host3:12345", "no sshd listens"]),
        (255, f"{CONNECT} Connection timed out", "timed out", ["host3:12345", "10 s"]),
        (255, f"{CONNECT} No route to host", "timed out", ["host3:12345", "down"]),
        (255, CHANGED, "host key changed", ["host3:12345", "/var/lib/hvdtrain-ssh/known_hosts:3"]),
        (255, UNKNOWN, "host key unknown", ["host3:12345", "hvdtrain-ssh keys FOLDER host3"]),
        (255, DENIED, "authentication", ["host3:12345", "/keys/id", "error in libcrypto"]),
        (255, "kex_exchange_identification: Connection closed by remote host", "closed", ["host3:12345", "by remote"]),
        (127, f"bash: line 1: {PYTHON}: No such file or directory", "interpreter", ["host3", PYTHON]),
        (1, "Traceback\nImportError: cannot import name", "failed", ["host3", "ImportError: cannot import name"]),
    ],
)
def test_failures_are_told_apart(status, stderr, kind, parts):
    fault = explain("host3", status, stderr, OPTIONS, PYTHON)
    assert fault.kind == kind
    assert [part for part in parts if part not in fault.message] == []
    assert fault.passing == (kind in ("refused", "timed out", "closed"))


def test_a_refused_key_is_named(tmp_path):
    fault = explain(
        "host3", 255, "x@host3: Permission denied (publickey).", SshOptions(12345, str(tmp_path / "key")), PYTHON
    )
    assert str(tmp_path / "key") in fault.message


def test_the_command_line_never_prompts_and_verifies():
    line = command_for("host3.invalid", ["python3", "-c", "print('a b')"], SshOptions(12345, "/keys/id"))
    assert line[0] == "ssh"
    assert line[-3:] == ["--", "host3.invalid", """python3 -c 'print('"'"'a b'"'"')'"""]
    options = {line[i + 1] for i, word in enumerate(line) if word == "-o"}
    assert {"BatchMode=yes", "StrictHostKeyChecking=yes", "IdentitiesOnly=yes"} <= options
    assert line[line.index("-p") + 1] == "12345"
    assert line[line.index("-i") + 1] == "/keys/id"


def test_this_machine_needs_no_ssh():
    assert is_local("localhost")
    assert is_local("127.0.0.1")
    assert not is_local("192.0.2.1")  # TEST-NET-1: nobody's
    assert command_for("localhost", ["true"], OPTIONS) == ["true"]
