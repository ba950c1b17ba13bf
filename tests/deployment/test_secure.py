"""TLS and a key for every site: who has none, another, or speaks in plain text is turned away."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedbnn.federation.engines.flower.loopback import until
from tests.cli.command import ROOT, final
from tests.deployment.machines import Machines

pytest.importorskip("flwr", reason='needs Flower: pip install -c constraints.txt ".[flower]"')

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]
PAGE = (ROOT / "docs" / "federation.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates and keys, made by the commands of the page; and one key that nobody knows."""
    home = tmp_path_factory.mktemp("keys")
    blocks = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    (made,) = [block for block in blocks if "-x509" in block]
    stranger = 'ssh-keygen -q -t ecdsa -b 384 -N "" -f keys/stranger\n'
    subprocess.run(["bash", "-ec", made + stranger], cwd=home, check=True, capture_output=True)
    return home / "keys"


@pytest.fixture(scope="module")
def machines(keys: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    """A SuperLink with TLS that knows the keys of three sites, which are there."""
    link = ["--ssl-ca-certfile", str(keys / "ca.crt"), "--ssl-certfile", str(keys / "server.crt")]
    link += ["--ssl-keyfile", str(keys / "server.key"), "--enable-supernode-auth"]
    tls = ["--root-certificates", str(keys / "ca.crt")]
    made = Machines(tmp_path_factory.mktemp("secure"), tls, link)
    try:
        made.superlink()
        for number in range(3):
            key = str(keys / f"site{number}")
            said = made.flwr("supernode", "register", f"{key}.pub", "here", "--name", f"s{number}")
            assert "registered" in said.lower(), said
            made.site(f"site{number}", str(number), *tls, "--auth-supernode-private-key", key)
        yield made
    finally:
        made.close()


def test_registered_sites_run_over_tls_to_the_same_bytes(machines: Machines, expected: str) -> None:
    said = machines.run("--config small.yaml --run_dir run")
    assert final(machines.home / "run") == expected, said


@pytest.mark.parametrize("who", ["keyless", "stranger", "plain"])
def test_others_are_turned_away(machines: Machines, keys: Path, who: str) -> None:
    tls = ["--root-certificates", str(keys / "ca.crt")]
    known = "--auth-supernode-private-key"
    ways = {
        "keyless": tls,
        "stranger": [*tls, known, str(keys / "stranger")],
        "plain": ["--insecure"],
    }
    before = machines.flwr("supernode", "ls", "here")
    assert before.count("online") == 3, before
    machines.site(who, "0", *ways[who])
    log = machines.home / f"{who}.log"
    until("its end or its retries", lambda: _refused(machines, who, log.read_text()))
    assert machines.flwr("supernode", "ls", "here").count("online") == 3


def _refused(machines: Machines, who: str, said: str) -> bool:
    """It has ended, or tries in vain."""
    return machines.running[who].poll() not in (None, 0) or said.count("retrying") > 1
