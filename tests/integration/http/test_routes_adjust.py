"""PATCH /sessions/{id}, and the same fields in POST /sessions."""

from tests.testing.rig import Server


async def test_session_is_adjusted_and_returns_its_values(server: Server) -> None:
    await server.create(overlap="average", ask_ahead=0.25)
    status, reply = await server.call("PATCH", "/sessions/arm", json={"overlap": "ensemble", "ask_ahead": None})
    assert (status, reply) == (
        200,
        {
            "message": "Session arm adjusted",
            "session_id": "arm",
            "overlap": "ensemble",
            "temporal_ensemble_coeff": 0.01,
            "ask_ahead": None,
            "action_steps": 1,
            "language_instruction": None,
            "accept_units": False,
            "warnings": {},
        },
    )
    _, found = await server.call("GET", "/sessions/arm")
    assert found["stats"].items() >= {"overlap": "ensemble", "action_steps": 1}.items()


async def test_invalid_adjustment_names_the_field_and_possible_values(server: Server) -> None:
    assert (await server.call("PATCH", "/sessions/arm", json={"overlap": "average"}))[0] == 404
    await server.create()
    for body, place, message in (
        ({"overlap": "rtc"}, "overlap", "possible with this policy: 'replace', 'weighted_average'"),
        ({"overlap": "fastest"}, "overlap", "Input should be 'replace', 'weighted_average'"),
        ({"action_steps": 21}, "action_steps", "wanted 1 to 20"),
        ({"action_steps": 0}, "action_steps", "greater than or equal to 1"),
        ({"ask_ahead": "soon"}, "ask_ahead", "valid number"),
        ({"overlap": "average", "temporal_ensemble_coeff": 0.5}, "temporal_ensemble_coeff", "has no coefficient"),
        ({"rate": 30}, "rate", "unknown field 'rate'; the known fields are: overlap, temporal_ensemble_coeff"),
        ({"overlapp": "average"}, "overlapp", "did you mean 'overlap'?"),
        ({}, None, "At least one of"),
    ):
        status, reply = await server.call("PATCH", "/sessions/arm", json=body)
        assert status == 422, body
        [entry] = reply["detail"]
        assert entry["loc"] == ["body", place][: 1 if place is None else 2]
        assert message in entry["msg"]


async def test_impossible_session_is_refused_at_its_creation(server: Server) -> None:
    status, reply = await server.create(overlap="rtc")
    assert status == 422
    assert reply["detail"][0]["loc"] == ["body", "overlap"]
    assert "'conservative'" in reply["detail"][0]["msg"], "the message must name the possible values"
    # Any failed creation ends in this status.
    assert (await server.call("GET", "/sessions/arm"))[1]["status"] == "error"
