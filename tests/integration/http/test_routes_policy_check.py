import pytest

DEMO = {"policy_path": "robojax/sim/policy"}


async def test_what_a_policy_needs_is_told_before_anything_is_loaded(server):
    status, told = await server.call("POST", "/policies/check", json=DEMO)
    assert (status, told["fits"], told["misfits"]) == (200, True, [])
    assert (told["policy_type"], told["camera_names"], told["rate"]) == ("act", ["front"], 25.0)
    assert told["camera_sizes"] == {"front": [96, 96]}
    assert told["joint_names"] == ["Rotation", "Pitch", "Elbow", "Wrist_Pitch", "Wrist_Roll", "Jaw"]
    assert told["requirements"]["chunk"] == 20
    # The range of the actions in training, of which a robot's program learns the unit.
    low, high = told["requirements"]["action_range"]
    assert (len(low), high[3], round(low[2], 1)) == (6, 100.0, -76.8)
    assert server.load.loads == []


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        ({"camera_names": ["top"]}, ["lacks ['front']"]),
        ({"policy_type": "diffusion", "camera_names": []}, ["is of type 'act'", "lacks ['front']"]),
        ({"rate": 400}, ["at most 200"]),
        ({"joint_names": ["a", "b"]}, ["joint_names of the request are 2"]),
    ],
)
async def test_all_that_does_not_fit_is_told_as_the_creation_would(server, wish, words):
    status, told = await server.call("POST", "/policies/check", json=DEMO | wish)
    assert (status, told["fits"], told["rate"], len(told["misfits"])) == (200, False, None, len(words))
    for text, word in zip(told["misfits"], words, strict=True):
        assert word in text


async def test_what_is_no_policy_is_refused_without_the_path_that_was_sent(server):
    status, told = await server.call("POST", "/policies/check", json={"policy_path": "tests/unit/service"})
    assert (status, told["detail"][0]["loc"], told["detail"][0]["type"]) == (422, ["body", "policy_path"], "policy")
    assert "config.json" in told["detail"][0]["msg"] or "model.safetensors" in told["detail"][0]["msg"]
    assert "tests/unit/service" not in str(told)


async def test_a_folder_called_like_a_word_of_the_text_is_taken_out_where_it_is_named_alone(server):
    _, told = await server.call("POST", "/policies/check", json={"policy_path": "nowhere/to/policy"})
    assert told["detail"][0]["msg"].startswith("policy <policy_path> cannot be used: <policy_path> is neither")


async def test_a_reader_with_a_bug_tells_no_more_than_its_kind(server, monkeypatch):
    def fail(path: str, revision: str | None):
        raise RuntimeError("token hf_abc in /root")

    monkeypatch.setattr(server.app.ctx.policy_reader, "_read", fail)
    status, told = await server.call("POST", "/policies/check", json=DEMO)
    assert status == 422
    assert "RuntimeError" in str(told)
    assert "hf_abc" not in str(told)


async def test_a_score_is_told_by_whoever_judges_it(server):
    await server.create()
    score = {"tried": 5, "succeeded": 4, "note": "cubes"}
    assert (await server.call("POST", "/sessions/arm/score", json=score))[0] == 200
    stats = (await server.call("GET", "/sessions/arm"))[1]["stats"]
    assert {name: stats["score"][name] for name in score} == score
    assert (await server.call("POST", "/sessions/arm/score", json={"tried": 1, "succeeded": 2}))[0] == 422
    assert (await server.call("POST", "/sessions/nobody/score", json=score))[0] == 404
