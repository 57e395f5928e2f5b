"""PATCH /sessions/{id}, and the same fields of POST /sessions."""

from tests.testing.rig import Server


async def test_a_session_is_adjusted_and_says_what_holds(server: Server) -> None:
    await server.create(overlap="average", ask_ahead=0.25)
    status, told = await server.call("PATCH", "/sessions/arm", json={"overlap": "ensemble", "ask_ahead": None})
    assert (status, told) == (
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


async def test_what_cannot_be_says_where_and_what_can(server: Server) -> None:
    assert (await server.call("PATCH", "/sessions/arm", json={"overlap": "average"}))[0] == 404
    await server.create()
    for body, place, said in (
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
        status, told = await server.call("PATCH", "/sessions/arm", json=body)
        assert status == 422, body
        [entry] = told["detail"]
        assert entry["loc"] == ["body", place][: 1 if place is None else 2]
        assert said in entry["msg"]


async def test_a_session_that_cannot_be_had_is_refused_at_its_making(server: Server) -> None:
    status, told = await server.create(overlap="rtc")
    assert status == 422
    assert told["detail"][0]["loc"] == ["body", "overlap"]
    assert "'conservative'" in told["detail"][0]["msg"], "and what can be had is named"
    # Like every one that could not be made ready.
    assert (await server.call("GET", "/sessions/arm"))[1]["status"] == "error"
