"""Types and ranges of the keys that describe a backbone, and what can be said of it before it is built."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from routing_lab.axes.base import Name, Positive, Refusal, Strict
from routing_lab.axes.facts import BackboneFacts
from routing_lab.cost.macs import ModelShape

Rope = Literal["plain", "linear", "ntk", "yarn"]
"""How rotary angles reach positions beyond those of training; see `routing_lab.backbones.decoder.stretched`."""


class BackboneConfig(Strict):
    """Keys that every backbone has.

    builder: path of the function that builds it, called with `num_classes`, `pretrained` and `arguments`.
    is_sized: it is built in any size, so that `isoflop` finds one.
    """

    builder: ClassVar[str]
    is_sized: ClassVar[bool] = False

    name: Name
    width: Positive
    depth: Positive
    heads: Positive

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments for the builder."""
        return self.model_dump(exclude={"name", "kind"})

    @property
    def published(self) -> str | None:
        """The name under which weights of it are published; None: there are none."""
        return None

    @property
    def no_weights(self) -> str | None:
        """Why it cannot start from published weights; None: it can."""
        return f"no weights of backbone={self.name} are published; use init=checkpoint"

    def facts(self) -> BackboneFacts:
        """What routing needs to know of this backbone."""
        return BackboneFacts(self.depth, self.width, self.heads)

    def shape(self, classes: int) -> ModelShape | None:
        """The shape that its cost depends on; None where only the built model knows it."""
        return None

    def refusals(self) -> Iterator[Refusal]:
        """What cannot be built."""
        if self.width % self.heads:
            yield "backbone.heads", self.heads, f"must divide backbone.width={self.width}"


class TimmBackboneConfig(BackboneConfig):
    """A vision transformer of timm, built from the fields or, where `timm_name` is set, as the model of that name."""

    builder: ClassVar[str] = "routing_lab.backbones.build.build_vit"
    is_sized: ClassVar[bool] = True

    kind: Literal["timm"]
    timm_name: str | None
    image_size: Positive
    patch_size: Positive
    patch_stride: Positive | None
    channels: Positive
    mlp_ratio: Annotated[float, Field(gt=0)] | None
    class_token: bool
    distilled: bool
    registers: int = Field(ge=0)
    layer_scale: Annotated[float, Field(gt=0)] | None
    qk_norm: bool | None
    pool: Literal["token", "avg"] | None
    mlp: Literal["gelu", "swiglu"] | None
    dropout: float = Field(ge=0, lt=1)
    drop_path: float = Field(ge=0, lt=1)

    @property
    def arguments(self) -> dict[str, Any]:
        return {
            "timm_name": self.timm_name,
            "patch_stride": self.patch_stride,
            "distilled": self.distilled,
            "mlp": self.mlp,
            "img_size": self.image_size,
            "patch_size": self.patch_size,
            "in_chans": self.channels,
            "embed_dim": self.width,
            "depth": self.depth,
            "num_heads": self.heads,
            "mlp_ratio": self.mlp_ratio,
            "class_token": self.class_token,
            "reg_tokens": self.registers,
            "init_values": self.layer_scale,
            "qk_norm": self.qk_norm,
            "global_pool": self.pool,
            "drop_rate": self.dropout,
            "drop_path_rate": self.drop_path,
        }

    @property
    def published(self) -> str | None:
        return self.timm_name

    @property
    def no_weights(self) -> str | None:
        return f"needs backbone.timm_name; backbone={self.name} has none" if self.timm_name is None else None

    def facts(self) -> BackboneFacts:
        return _vision_facts(self, self.num_patches)

    @property
    def num_patches(self) -> int:
        """Patches of an image."""
        return ((self.image_size - self.patch_size) // (self.patch_stride or self.patch_size) + 1) ** 2

    def shape(self, classes: int) -> ModelShape | None:
        if self.mlp_ratio is None or self.mlp is None:
            return None
        hidden = int(self.width * self.mlp_ratio)
        return ModelShape(
            width=self.width,
            depth=self.depth,
            heads=self.heads,
            mlp_hidden=hidden // 2 if self.mlp == "swiglu" else hidden,
            mlp_matrices=3 if self.mlp == "swiglu" else 2,
            positions=self.num_patches,
            prefix=len(self.facts().prefix),
            patch_inputs=self.patch_size**2 * self.channels,
            classes=classes,
            head_tokens=2 if self.distilled else 1,
        )

    def refusals(self) -> Iterator[Refusal]:
        yield from super().refusals()
        size, patch, stride = self.image_size, self.patch_size, self.patch_stride
        if stride is None and size % patch:
            yield "backbone.image_size", size, f"must be a multiple of backbone.patch_size={patch}"
        elif stride is not None and stride > patch:
            yield "backbone.patch_stride", stride, f"must be at most backbone.patch_size={patch}"
        elif patch > size:
            yield "backbone.patch_size", patch, f"must be at most backbone.image_size={size}"
        if self.pool == "token" and not self.class_token:
            yield "backbone.pool", "token", "needs backbone.class_token=true; use backbone.pool=avg"
        if self.distilled and not self.class_token:
            yield "backbone.distilled", True, "needs backbone.class_token=true"
        if self.timm_name is None:
            for key in ("mlp_ratio", "qk_norm", "pool", "mlp"):
                if getattr(self, key) is None:
                    yield f"backbone.{key}", None, "may be null only where backbone.timm_name is set"


class HfBackboneConfig(BackboneConfig):
    """A vision transformer of transformers with a classifier: of a folder, of a name of the hub, or built from options.

    Every key of its shape repeats what `model_type` and `options` say.
    """

    builder: ClassVar[str] = "routing_lab.backbones.hf_build.build_hf"

    kind: Literal["hf"]
    folder: Annotated[str, Field(min_length=1)] | None
    hf_name: Annotated[str, Field(min_length=1)] | None
    download: bool
    model_type: Annotated[str, Field(min_length=1)]
    options: dict[str, Any]
    image_size: Positive
    patch_size: Positive
    channels: Positive
    class_token: bool
    distilled: bool
    registers: int = Field(ge=0)

    @property
    def arguments(self) -> dict[str, Any]:
        place = self.hf_name if self.folder is None else str(Path(self.folder).expanduser())
        return {
            "model_type": self.model_type,
            "options": self.options,
            "place": place,
            "download": self.download,
        }

    @property
    def published(self) -> str | None:
        return self.hf_name if self.folder is None else self.folder

    @property
    def no_weights(self) -> str | None:
        if self.published is None:
            return "needs backbone.folder or backbone.hf_name, of which the weights are"
        if self.folder is not None and not any(Path(self.folder).expanduser().glob("*model*.[sb]*")):
            return f"backbone.folder={self.folder} holds no weights (such as model.safetensors); use init=scratch"
        return None

    def facts(self) -> BackboneFacts:
        return _vision_facts(self, (self.image_size // self.patch_size) ** 2)

    def refusals(self) -> Iterator[Refusal]:
        yield from super().refusals()
        if self.image_size % self.patch_size:
            yield "backbone.image_size", self.image_size, f"must be a multiple of patch_size={self.patch_size}"


class LlamaBackboneConfig(BackboneConfig):
    """A decoder of the Llama family."""

    builder: ClassVar[str] = "routing_lab.backbones.build.build_llama"

    kind: Literal["llama"]
    vocab_size: Positive
    context: Positive
    kv_heads: Positive
    mlp_width: Positive
    rope_theta: float = Field(default=10000.0, gt=1, description="base of the rotary angles")
    norm_eps: float = Field(default=1e-6, gt=0, description="added to the mean square in norms")
    tie_embeddings: bool = Field(default=False, description="the head has the weights of the embedding")

    def facts(self) -> BackboneFacts:
        return BackboneFacts(self.depth, self.width, self.heads, causal=True)

    def refusals(self) -> Iterator[Refusal]:
        yield from super().refusals()
        if self.heads % self.kv_heads:
            yield "backbone.kv_heads", self.kv_heads, f"must divide backbone.heads={self.heads}"
        if self.width // self.heads % 2:
            yield "backbone.width", self.width, "must give every head an even width (rotary embedding)"


def _vision_facts(backbone: TimmBackboneConfig | HfBackboneConfig, patches: int) -> BackboneFacts:
    kinds = ["class"] * backbone.class_token + ["distillation"] * backbone.distilled
    kinds += ["registers"] * backbone.registers
    return BackboneFacts(backbone.depth, backbone.width, backbone.heads, tuple(kinds), len(kinds) + patches)
