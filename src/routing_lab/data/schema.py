"""Types and ranges of the `data` keys, one pydantic model per data set; `DataConfig` picks the model by `data.name`.

Torch-free: the command checks these values before torch is imported. Values come from `conf/data/<name>.yaml`, so
no field has a default here. `image_size` and `channels` follow the backbone.

A key named `root` says where a data set lies on this machine and nothing about what is in it.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from routing_lab.data.text.schema import HubTextData, InductionData, ShakespeareData, TextFilesData


class _Images(BaseModel):
    """What every image data set states: the size and channels the backbone wants, and how pixels become numbers."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)
    modality: ClassVar[Literal["images", "text"]] = "images"

    knows_informative: ClassVar[bool] = False
    """Which patches decide the class is known of every image."""

    any_length: ClassVar[bool] = False
    """An example can be read at other lengths too, as a text can."""

    image_size: int = Field(ge=1, description="pixels; every image is brought to image_size x image_size")
    channels: Literal[1, 3] = Field(description="1 = grey, 3 = RGB; images are converted")
    mean: list[float] = Field(description="per channel, in units of [0, 1]; one value serves all channels")
    std: list[float] = Field(description="per channel, in units of [0, 1]; one value serves all channels")
    interpolation: Literal["bilinear", "bicubic"] = Field(description="how images are resized")
    flip: bool = Field(description="whether mirroring an image keeps its class, so that augmentation may do it")
    shift: float = Field(ge=0, le=0.5, description="largest shift of augmentation, as a fraction of the image's side")

    @property
    def num_masked(self) -> int | None:
        """Patches of an image of which the data say whether they decide the class; None: they do not."""
        return None

    @field_validator("mean", "std")
    @classmethod
    def _one_value_a_channel(cls, values: list[float], info: ValidationInfo) -> list[float]:
        channels = info.data.get("channels")
        if channels is not None and len(values) not in (1, channels):
            raise ValueError(f"expected 1 value or data.channels={channels} values")
        if info.field_name == "std" and not all(value > 0 for value in values):
            raise ValueError("expected numbers > 0")
        return values


class _Carved(_Images):
    """Sets without a validation split of their own: it is carved out of the training split, stratified by class."""

    val_fraction: float = Field(gt=0, lt=1, description="part of the training split that becomes `val`")
    split_seed: int = Field(ge=0, lt=2**64, description="seed of the carved split; the run's seed does not enter")


class _Files(_Images):
    crop_pct: float = Field(gt=0, le=1, description="evaluation: side of the centre crop over the resized shorter side")


class DigitsData(_Images):
    """scikit-learn's handwritten digits: 1797 grey images of 8 x 8, split 1257/180/360, the same for every seed."""

    name: Literal["digits"]
    num_classes: Literal[10]

    @property
    def num_train(self) -> int:
        """Training examples."""
        return 1257


class CifarData(_Carved):
    """CIFAR-10 or CIFAR-100 in torchvision's layout; the official test split is `test`."""

    name: Literal["cifar10", "cifar100"]
    num_classes: Literal[10, 100]
    root: str = Field(min_length=1)
    download: bool

    @property
    def num_train(self) -> int:
        """Training examples that the carved validation split leaves."""
        return 50_000 - round(self.val_fraction * 50_000)

    @model_validator(mode="after")
    def _classes_of_the_set(self) -> Self:
        expected = 10 if self.name == "cifar10" else 100
        if self.num_classes != expected:
            raise ValueError(f"data.num_classes={self.num_classes}: {self.name} has {expected} classes")
        return self


class ImageFolderData(_Carved, _Files):
    """Any folder or ZIP archive of class folders, with `train`, `val`/`valid`, `test` folders above them or without."""

    name: Literal["image_folder"]
    path: str = Field(min_length=1, description="a folder, or a .zip file that is read in place")
    num_classes: int | None = Field(ge=2, description="null = as many as there are class folders")
    test_fraction: float = Field(gt=0, lt=1, description="part that becomes `test` when there is no folder for it")
    memory: bool | None = Field(
        description="keep decoded images of image_size in memory; null = when image_size <= 64 and they fit in 1 GiB"
    )
    duplicates: Literal["refuse", "drop", "allow"] = Field(
        default="refuse", description="what becomes of a file that stands in two splits with the same content"
    )

    @model_validator(mode="after")
    def _something_left_to_train_on(self) -> Self:
        if self.val_fraction + self.test_fraction >= 1:
            raise ValueError(
                f"data.val_fraction={self.val_fraction} and data.test_fraction={self.test_fraction} leave nothing to"
                " train on; expected a sum below 1"
            )
        return self


class ImageNetData(_Carved, _Files):
    """ImageNet-1k as class folders `train/<wnid>` and `val/<wnid>`; the official validation images are `test`."""

    name: Literal["imagenet"]
    num_classes: Literal[1000]
    root: str = Field(min_length=1)


class ImageNet100Data(_Carved, _Files):
    """The ImageNet classes named in `class_list`: a text file, one wnid a line, its path relative to `root`."""

    name: Literal["imagenet100"]
    num_classes: int = Field(ge=2)
    root: str = Field(min_length=1)
    class_list: str = Field(min_length=1)


class CarsData(_Carved, _Files):
    """Stanford Cars in torchvision's layout; it can no longer be downloaded from its original address."""

    name: Literal["cars"]
    num_classes: Literal[196]
    root: str = Field(min_length=1)


class PetsData(_Carved, _Files):
    """Oxford-IIIT Pet in torchvision's layout; `trainval` is divided into `train` and `val`."""

    name: Literal["pets"]
    num_classes: Literal[37]
    root: str = Field(min_length=1)
    download: bool


class FlowersData(_Files):
    """Oxford Flowers 102 in torchvision's layout, with its official three splits."""

    name: Literal["flowers"]
    num_classes: Literal[102]
    root: str = Field(min_length=1)
    download: bool


class PlantedData(_Images):
    """Synthetic images whose class is spelt by a few patches at random places; see `routing_lab.data.planted`."""

    knows_informative: ClassVar[bool] = True

    name: Literal["planted"]
    num_classes: int = Field(ge=2)
    form: Literal["spelling", "chain"] = Field(
        description="spelling: informative patches spell the class; chain: each points to the next, the last names it"
    )
    patch_size: int = Field(ge=1, description="pixels; the mask has one entry a patch")
    num_informative: int = Field(ge=1, description="patches that together say the class")
    num_distractors: int = Field(ge=0, description="patches that look as conspicuous and mean nothing")
    noise: float = Field(ge=0, le=2, description="standard deviation of the pixel noise over a pattern's amplitude")
    num_train: int = Field(ge=1)
    num_val: int = Field(ge=1)
    num_test: int = Field(ge=1)
    seed: int = Field(ge=0, lt=2**64, description="seed of patterns and images; the run's seed does not enter")

    @property
    def grid(self) -> int:
        """Patches along one side."""
        return self.image_size // self.patch_size

    @property
    def num_masked(self) -> int:
        return self.grid**2

    @property
    def num_symbols(self) -> int:
        """Symbols of one informative patch: the smallest m with m ** num_informative >= num_classes."""
        symbols = 2
        while symbols**self.num_informative < self.num_classes:
            symbols += 1
        return symbols

    @property
    def num_keys(self) -> int:
        """`form=chain`: keys beside the one that begins a chain, each carried by one patch of an image."""
        return self.num_informative - 1 + self.num_distractors

    @property
    def num_patterns(self) -> int:
        """Distinct patterns. Spelling: the symbols of every informative patch, and as many for distractors; chain: the
        keys and the classes.
        """
        if self.form == "chain":
            return 1 + self.num_keys + self.num_classes
        return 2 * self.num_symbols * self.num_informative

    @property
    def num_values(self) -> int:
        """Pixels times channels of one pattern: a patch's, or half a patch's in a chain."""
        return self.channels * self.patch_size**2 // (2 if self.form == "chain" else 1)

    @model_validator(mode="after")
    def _patches_fit(self) -> Self:
        if self.image_size % self.patch_size:
            raise ValueError(
                f"data.patch_size={self.patch_size}: expected a divisor of data.image_size={self.image_size}"
            )
        if self.num_informative + self.num_distractors > self.grid**2:
            raise ValueError(
                f"data.num_informative={self.num_informative} and data.num_distractors={self.num_distractors}: expected"
                f" a sum of at most {self.grid**2}, the number of patches"
            )
        if self.form == "chain":
            self._links_fit()
        values = self.num_values
        if self.num_patterns > 2**values:
            part = "half a patch" if self.form == "chain" else "a patch"
            raise ValueError(
                f"data.num_classes={self.num_classes}: needs {self.num_patterns} distinct patterns, {part} of {values}"
                f" values has {2**values}; expected fewer classes or a larger data.patch_size"
            )
        if self.flip or self.shift:
            raise ValueError(
                f"data.flip={self.flip}, data.shift={self.shift}: moving a planted image would detach it from its mask;"
                " expected flip: false and shift: 0.0"
            )
        return self

    def _links_fit(self) -> None:
        links = self.num_informative - 1
        if not links:
            raise ValueError("data.num_informative=1: a chain needs at least 2 patches")
        if self.num_distractors % links:
            raise ValueError(
                f"data.num_distractors={self.num_distractors}: expected a multiple of {links}, the patches of a chain"
                " without its beginning"
            )
        if self.channels * self.patch_size**2 % 2:
            raise ValueError(
                f"data.patch_size={self.patch_size}: a patch of {self.channels * self.patch_size**2} values has no two"
                " halves; expected an even number"
            )


DataConfig = Annotated[
    DigitsData
    | CifarData
    | ImageFolderData
    | ImageNetData
    | ImageNet100Data
    | CarsData
    | PetsData
    | FlowersData
    | PlantedData
    | ShakespeareData
    | TextFilesData
    | HubTextData
    | InductionData,
    Field(discriminator="name"),
]
"""The `data` node of a resolved configuration, chosen by `data.name`."""

DATA_SETS: dict[str, type[Any]] = {
    "digits": DigitsData,
    "image_folder": ImageFolderData,
    "cifar10": CifarData,
    "cifar100": CifarData,
    "imagenet": ImageNetData,
    "imagenet100": ImageNet100Data,
    "cars": CarsData,
    "pets": PetsData,
    "flowers": FlowersData,
    "planted": PlantedData,
    "shakespeare": ShakespeareData,
    "text_files": TextFilesData,
    "hub_text": HubTextData,
    "induction": InductionData,
}
"""Shipped data sets by name."""
