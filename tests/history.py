"""A callback that keeps the pools of every step."""

from types import SimpleNamespace

from d5p4 import Snapshot


class History(dict[int, list[SimpleNamespace]]):
    """Entry p has a record of every step of prompt p."""

    def __call__(self, shot: Snapshot) -> None:
        view = shot.view
        every = {"tokens": shot.tokens, "scores": view.raw, "quality": view.quality, "similarity": view.similarity}
        every |= {"group": view.group, "parents": shot.choice.parents, "awake": shot.awake}
        for place, number in enumerate(shot.prompts.tolist()):
            own = {name: None if values is None else values[place].clone() for name, values in every.items()}
            self.setdefault(number, []).append(SimpleNamespace(step=shot.taken[place], **own))
