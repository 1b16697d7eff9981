"""`dataplane config`: which settings hold, where they come from, and none of them a secret."""

from __future__ import annotations

from pathlib import Path

from dataplane import Client, Config
from dataplane.gateway.access.tokens import new_token
from dataplane.gateway.config import GatewayConfig
from tests.dataplane.cli.conftest import Operator


def with_(operator: Operator, **variables: str) -> Operator:
    return Operator({**operator.environment, **variables})


def test_each_setting_says_its_value_and_where_it_comes_from(
    operator: Operator, plane: Client
) -> None:
    set_ = with_(operator, DATAPLANE_TIMEOUT_S="7.5", DATAPLANE_GATEWAY_DRAIN_S="3")
    found = set_.ask("config", "-o", "json").json
    settings = {each["name"]: each for each in found["plane"]}
    assert settings["timeout_s"]["value"] == 7.5
    assert settings["timeout_s"]["source"] == "environment"
    assert settings["wait_timeout_s"]["value"] == 600
    assert settings["wait_timeout_s"]["source"] == "default"
    gateway = {each["name"]: each for each in found["gateway"]}
    assert gateway["drain_s"]["value"] == 3
    assert found["unknown"] == []
    assert found["reached"]["plane_id"] == plane.plane_id
    assert found["reached"]["stores"]["local"]["capacity_bytes"] == 256 << 20
    text = set_.ask("config").out
    line = next(line for line in text.splitlines() if line.startswith("timeout_s"))
    assert line.split() == ["timeout_s", "7.5", "environment"]
    assert max(map(len, text.splitlines())) <= 80 or plane.plane_id in text
    assert "drain_s" in set_.ask("config", "--gateway").out


def test_the_schema_has_every_setting_with_unit_default_and_text(operator: Operator) -> None:
    found = operator.ask("config", "--schema", "-o", "json").json
    for of, kind in (("plane", Config), ("gateway", GatewayConfig)):
        settings = {each["name"]: each for each in found[of]}
        assert set(settings) == set(kind.model_fields)
        for name, each in settings.items():
            if name.endswith("_s"):
                assert each["unit"] == "seconds"
            if name.endswith("_bytes"):
                assert each["unit"] == "bytes"
            assert each["variable"] == f"{kind.model_config['env_prefix']}{name}".upper()  # pyright: ignore[reportTypedDictNotRequiredAccess]
    by_name = {each["name"]: each for each in found["plane"]}
    assert by_name["timeout_s"]["doc"] == "Deadline of a call that names none."
    assert by_name["tls_cert"]["doc"] == by_name["tls_ca"]["doc"] != ""
    assert by_name["segment_bytes"]["default"] == 64 << 20
    assert by_name["shm_dir"]["default"] == "/dev/shm"
    undocumented = [each["name"] for each in found["plane"] if not each["doc"]]
    assert undocumented == []
    text = operator.ask("config", "--schema").out
    assert "DATAPLANE_TIMEOUT_S" in text
    assert max(map(len, text.splitlines())) <= 80


def test_without_a_plane_the_settings_are_shown_all_the_same(tmp_path: Path) -> None:
    alone = Operator({"DATAPLANE_RUNTIME_DIR": str(tmp_path / "none"), "DATAPLANE_NAME": "none"})
    found = alone.run("config", "-o", "json").json
    assert found["reached"]["plane"] is None
    assert "no plane 'none'" in found["reached"]["why"]
    assert len(found["plane"]) == len(Config.model_fields)


def test_no_token_is_shown_and_misspelled_variables_are(operator: Operator) -> None:
    token = new_token().text
    set_ = with_(
        operator,
        DATAPLANE_TOKEN_FILE=f"/run/{token}",
        DATAPLANE_CAPACITY="1",
        DATAPLANE_SECRET=token,
    )
    for output in ("table", "json", "yaml", "csv"):
        said = set_.ask("config", "-o", output)
        assert token not in said.out + said.err
        assert token[-12:] not in said.out + said.err
    assert set_.ask("config", "-o", "json").json["unknown"] == [
        "DATAPLANE_CAPACITY",
        "DATAPLANE_SECRET",
    ]
    assert "DATAPLANE_CAPACITY is no setting" in set_.ask("config").out


def test_a_setting_that_is_wrong_ends_with_2(operator: Operator) -> None:
    for name, value in (("DATAPLANE_TIMEOUT_S", "-1"), ("DATAPLANE_GATEWAY_DRAIN_S", "soon")):
        said = with_(operator, **{name: value}).ask("config", ok=False)
        assert said.code == 2
        assert name.removeprefix("DATAPLANE_").removeprefix("GATEWAY_").lower() in said.err
