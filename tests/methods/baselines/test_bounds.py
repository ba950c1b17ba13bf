"""The bounds: joint sees everything so far, local never shares a weight."""

import torch

from fedbnn.methods.bounds import Joint, JointStream, Local
from fedbnn.methods.fedavg import FedAvg


def test_the_pool_of_the_first_round_is_the_data_of_its_participants(toy) -> None:
    stream = toy(num_clients=6, per_round=3)
    pool, everything = (
        JointStream(stream).train(1, 0),
        [stream.train(1, client).pixels for client in stream.participants(1)],
    )
    assert torch.equal(pool.pixels, torch.cat(everything))
    assert pool.counts() == JointStream(stream).counts(1, 0)


def test_later_pools_are_all_images_so_far_each_of_them_once(toy) -> None:
    stream = toy(num_clients=6, per_round=3)
    pool = JointStream(stream)
    assert set(pool.counts(4, 0)) == {"toy/0", "toy/1", "toy/2", "toy/3"}
    assert pool.participants(4) == (0,)
    data = pool.at(4, 0, 5)
    assert torch.equal(data.images.pixels, pool.train(4, 0).pixels)
    assert len(next(iter(data.train_dataloader()))[1]) == 5
    assert torch.equal(JointStream(stream).train(4, 0).pixels, pool.train(4, 0).pixels)
    past = {
        tuple(image.flatten().tolist())
        for number in range(1, 5)
        for client in stream.participants(number)
        for image in stream.train(number, client).pixels
    }
    pooled = [tuple(image.flatten().tolist()) for image in pool.train(4, 0).pixels]
    assert set(pooled) == past
    assert len(pooled) == len(past) < 4 * 3 * stream.images


def test_joint_goes_on_training_old_rows(toy, played) -> None:
    states = played(Joint(), toy()).states
    assert not torch.equal(states[1]["prototypes"][:2], states[-1]["prototypes"][:2])


def test_local_clients_keep_whole_models_of_their_own(toy, played) -> None:
    run = played(Local(), toy())
    assert all(torch.equal(state["backbone"], run.states[0]["backbone"]) for state in run.states)
    assert set(run.privates) == {0, 1, 2, 3}
    backbones = [own["backbone"] for own in run.privates.values()]
    assert not any(
        torch.equal(one, two) for number, one in enumerate(backbones) for two in backbones[:number]
    )
    assert all(
        set(own.classes) == {"toy/0", "toy/1", "toy/2", "toy/3"} for own in run.privates.values()
    )


def test_one_local_client_is_one_fedavg_client(toy, played) -> None:
    alone = toy(num_clients=1, per_round=1)
    own, averaged = (
        played(Local(), alone).privates[0],
        played(FedAvg(share="backbone_only"), alone).last,
    )
    assert torch.equal(own["backbone"], averaged["backbone"])


def test_local_sends_nothing_up(toy, played) -> None:
    local, averaged = played(Local(), toy()).records[1], played(FedAvg(), toy()).records[1]
    assert local["bytes_up"]["train"] < averaged["bytes_up"]["train"] / 1.5
