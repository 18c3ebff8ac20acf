"""What is found among the arguments of a forward: noisy input, timestep, conditioning, options."""

from __future__ import annotations

import pytest
import torch

from diffcache.signature import CallSignature

X, TEXT, IMAGE = torch.zeros(1, 2), torch.ones(1, 3), torch.ones(1, 4)


class Usual:
    def forward(self, hidden_states, timestep, encoder_hidden_states=None, return_dict=True):
        """Most diffusers transformers."""


class TimeFirst:
    def forward(self, t, x, y=None):
        """Some own loops."""


class Streams:
    def forward(
        self,
        hidden_states,
        audio_hidden_states,
        encoder_hidden_states,
        image_embeds=None,
        timestep=None,
        audio_timestep=None,
        skip_layers=None,
        scale=1.0,
        added_cond_kwargs=None,
        **kwargs,
    ):
        """Two noisy streams and much else."""


def bind(cls, *args, **kwargs):
    return CallSignature(cls.forward, cls.__name__).bind(args, kwargs)


def same(a, b):
    """Whether two bound calls hold the very same tensors and values."""
    ids = [[(name, id(tensor)) for name, tensor in call.conditioning] for call in (a, b)]
    return a.inputs[0] is b.inputs[0] and a.timestep == b.timestep and ids[0] == ids[1]


@pytest.mark.parametrize("timestep", [500, 500.0, torch.tensor(500), torch.tensor([500.0])])
def test_positional_keyword_and_mixed(timestep):
    """However the arguments are passed, the call is the same."""
    calls = [
        bind(Usual, X, timestep, TEXT),
        bind(Usual, X, timestep=timestep, encoder_hidden_states=TEXT),
        bind(Usual, encoder_hidden_states=TEXT, timestep=timestep, hidden_states=X),
    ]
    assert all(same(calls[0], call) for call in calls)
    assert calls[0].timestep == 500.0 and isinstance(calls[0].timestep, float)
    assert calls[0].hidden_states is X and calls[0].conditioning[0][1] is TEXT


def test_time_may_come_first():
    """The noisy input is the first argument that is not the time."""
    call = bind(TimeFirst, 3, X, TEXT)
    assert call.timestep == 3.0 and call.hidden_states is X
    assert [name for name, _ in call.conditioning] == ["y"]


def test_streams_are_not_conditioning():
    """Second noisy streams and times change at every step; text and image do not."""
    call = bind(
        Streams, X, X.clone(), TEXT, IMAGE, timestep=1.0, audio_timestep=torch.tensor([1.0])
    )
    assert [name for name, _ in call.conditioning] == ["encoder_hidden_states", "image_embeds"]


def test_options_tell_passes_apart():
    """Switches and lists of layers are options; plain numbers and tensors are not."""
    call = bind(Streams, X, X, TEXT, timestep=1.0, skip_layers=[7, 8], scale=2.0)
    assert dict(call.options) == {"skip_layers": (7, 8)}
    assert dict(bind(Usual, X, 1, TEXT, return_dict=False).options) == {"return_dict": False}
    hash(call.options)


def test_list_of_inputs():
    """Z-Image and others take a list of latents and of texts."""
    call = bind(Usual, [X, X], torch.tensor([1.0, 1.0]), [TEXT, IMAGE])
    assert len(call.inputs) == 2 and call.hidden_states is X
    assert [tensor is t for (_, tensor), t in zip(call.conditioning, [TEXT, IMAGE], strict=True)]
    assert len(call.conditioning) == 2


def test_dict_of_tensors_is_conditioning():
    """Embeddings in a dict (SDXL's added_cond_kwargs) tell passes apart too."""
    a, b = ({"image_embeds": torch.full((1, 2), v)} for v in (1.0, 2.0))
    calls = [bind(Streams, X, X, TEXT, timestep=1.0, added_cond_kwargs=d) for d in (a, b, a)]
    keys = [[id(tensor) for _, tensor in call.conditioning] for call in calls]
    assert keys[0] == keys[2] != keys[1]


@pytest.mark.parametrize(
    ("timestep", "expected"),
    [
        (7, 7.0),
        (0.25, 0.25),
        (torch.tensor(7), 7.0),
        (torch.tensor([7.0]), 7.0),
        (torch.full((4,), 7.0), 7.0),
        (torch.tensor(7.0).expand(4), 7.0),
        (torch.tensor([7.0]).expand(2, 30), 7.0),
        (torch.full((2, 30), 7.0), 7.0),
        (torch.tensor([[0.0, 0.0, 7.0, 7.0]]), 7.0),
        (torch.zeros(2, 3), 0.0),
        (torch.tensor([7.0]).bfloat16(), 7.0),
        (torch.tensor([5.0, 7.0]), None),
        (torch.tensor([[0.0, 5.0, 7.0]]), None),
        (torch.zeros(0), None),
        (None, None),
    ],
)
def test_one_number_for_the_timestep(timestep, expected):
    """Numbers, scalars, batches and token maps; None where there is no one time."""
    assert bind(Usual, X, timestep, TEXT).timestep == expected


def test_missing_timestep_argument():
    """A denoiser called without its time has no one time."""
    assert bind(Usual, X).timestep is None


def test_forward_without_a_timestep():
    """The message names the class and what to do."""

    class Encoder:
        def forward(self, input_ids):
            """No time here."""

    with pytest.raises(ValueError, match=r"^Encoder\.forward takes no timestep .*wrapper module"):
        CallSignature(Encoder.forward, "Encoder")


def test_missing_input():
    """Without a noisy input there is nothing to look at."""
    with pytest.raises(TypeError, match="hidden_states must be a tensor"):
        bind(Usual, timestep=1.0)
