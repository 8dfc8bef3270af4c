"""The model of a config and a checkpoint, and images as it takes them."""

import cv2
import numpy as np
import pytest
import torch
from helpers.small import SMALL_ARCH
from mmcv.transforms import LoadImageFromFile
from mmengine.config import Config
from mmpretrain import get_model
from PIL import Image

from attncnn_plugin.commands.config_model import ConfigModel
from attncnn_plugin.commands.model import stacked

MEAN, STD = [120, 110, 100], [60, 61, 62]


def photo(seed, height=16, width=16):
    """More red than green, more green than blue."""
    noise = np.random.default_rng(seed).integers(0, 60, (height, width, 3))
    return (noise + [180, 100, 20]).astype(np.uint8)


def save_config(folder, repository, **options):
    """A small network for images in a folder, and its checkpoint."""
    config = Config.fromfile(str(repository / 'configs/sa_quadratic_digits.py'))
    config.model.backbone.update(arch=SMALL_ARCH, in_channels=3)
    config.model.head.in_channels = 16
    config.data_preprocessor = dict(num_classes=10, mean=MEAN, std=STD, to_rgb=True)
    steps = [dict(type='LoadImageFromFile'), dict(type='PackInputs')]
    config.test_dataloader.dataset = dict(type='CustomDataset', data_root=str(folder / 'data'), pipeline=steps)
    config.merge_from_dict(options)
    config.dump(str(folder / 'config.py'))
    torch.save(dict(state_dict=get_model(config).state_dict(), meta=dict(epoch=7)), folder / 'model.pth')


@pytest.fixture
def folder(tmp_path, repository):
    for i in range(6):
        path = tmp_path / f'data/class{i // 3}/{i}.png'
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(photo(i)).save(path)
    save_config(tmp_path, repository)
    return tmp_path


def load(folder, **options):
    return ConfigModel(str(folder / 'config.py'), str(folder / 'model.pth'), options)


def read(loaded, path):
    return loaded.read(str(path))


def test_a_config_without_a_scope(folder):
    """As mmpretrain's own in Python have it."""
    assert load(folder, default_scope=None).config.default_scope is None


def test_files_are_read_as_the_test_set_reads_them(folder):
    loaded = load(folder)
    assert not loaded.model.training and loaded.meta == dict(epoch=7)
    assert loaded.shape == (3, 16, 16) and len(loaded.test_set) == 6
    images = [read(loaded, folder / f'data/class{i // 3}/{i}.png')[0] for i in range(6)]
    assert all(torch.equal(image, loaded.read(str(i))[0]) for i, image in enumerate(images))
    tests, files = loaded.images(None, 3), loaded.images([str(folder / 'data')], 2)
    assert [image.name for image in tests + files] == ['test image 0', 'test image 2', 'test image 4', '0.png', '3.png']
    assert [image.label for image in tests + files] == [None] * 3 + [0, 1]
    assert all(torch.equal(image.tensor, images[2 * i]) for i, image in enumerate(tests))
    assert torch.equal(stacked(loaded.images([str(folder / 'data')], 2)), torch.stack([images[0], images[3]]))
    expected = (photo(1) - np.array(MEAN)) / np.array(STD)
    assert np.allclose(images[1].permute(1, 2, 0).numpy(), expected, atol=1e-5)


@pytest.mark.parametrize('to_rgb', [True, False])
def test_pictures_are_red_first(folder, to_rgb):
    loaded = load(folder, **{'data_preprocessor.to_rgb': to_rgb})
    image, picture = read(loaded, folder / 'data/class0/0.png')
    assert np.array_equal(picture, photo(0)) and np.array_equal(loaded.read('0')[1], photo(0))
    # Without to_rgb the model takes files as they are read, blue first.
    assert np.allclose(image[0].numpy(), (photo(0)[..., 0 if to_rgb else 2] - 120.0) / 60, atol=1e-5)


@pytest.mark.parametrize('loading', ['mmcv.LoadImageFromFile', LoadImageFromFile])
def test_how_the_step_that_loads_files_is_written(folder, loading):
    pipeline = [dict(type=loading), dict(type='PackInputs')]
    part = dict(_delete_=True, type='BalancedSubset', num_images=1, dataset=dict(pipeline=pipeline))
    for options in ({'test_dataloader.dataset.pipeline': pipeline}, {'test_dataloader.dataset': part}):
        loaded = load(folder, **options)
        assert np.array_equal(read(loaded, folder / 'data/class0/0.png')[1], photo(0))


def test_images_in_memory_are_red_first(folder):
    in_memory = dict(_delete_=True, type='CIFAR10', data_prefix='nowhere', pipeline=[dict(type='PackInputs')])
    loaded = load(folder, **{'data_preprocessor.to_rgb': False, 'test_dataloader.dataset': in_memory})
    image, picture = read(loaded, folder / 'data/class0/0.png')
    assert np.array_equal(picture, photo(0)) and np.allclose(image[0].numpy(), (photo(0)[..., 0] - 120.0) / 60)


def test_grey_images(folder, repository):
    steps = [dict(type='LoadImageFromFile', color_type='grayscale'), dict(type='PackInputs')]
    options = {'data_preprocessor': dict(_delete_=True, mean=[100], std=[50]), 'model.backbone.in_channels': 1}
    save_config(folder, repository, **options, **{'test_dataloader.dataset.pipeline': steps})
    loaded = load(folder)
    image, picture = read(loaded, folder / 'data/class0/0.png')
    assert image.shape == (1, 16, 16)
    grey = cv2.cvtColor(photo(0), cv2.COLOR_RGB2GRAY).astype(int)
    assert abs(image[0].numpy() * 50 + 100 - grey).max() <= 1.001
    assert np.allclose(picture, np.repeat(image[0].numpy()[..., None] * 50 + 100, 3, axis=2), atol=0.01)
    config = str(repository / 'configs/resnet18_to_attention_digits.py')  # its backbone has the CNN inside
    torch.save(get_model(config).state_dict(), folder / 'cnn.pth')
    loaded = ConfigModel(config, str(folder / 'cnn.pth'))
    assert read(loaded, folder / 'data/class0/0.png')[0].shape == (1, 16, 16)


def test_another_size_is_said_and_fitted(folder, capsys):
    bar = np.zeros((32, 8, 3), np.uint8)
    Image.fromarray(np.concatenate([bar, photo(0, 32, 48), bar], axis=1)).save(folder / 'wide.png')
    loaded = load(folder, **{'model.backbone.img_size': (16, 24)})
    _, picture = read(loaded, folder / 'wide.png')
    assert picture.shape == (16, 24, 3) and picture.min() > 0  # the middle of it
    said = 'wide.png: (32, 64) pixels after the test pipeline are scaled and cropped to (16, 24)'
    assert said in capsys.readouterr().err
    assert read(load(folder), folder / 'data/class0/0.png')[0].shape == (3, 16, 16)
    assert 'after the test pipeline' not in capsys.readouterr().err


def test_kinds_of_files(folder):
    loaded = load(folder)
    expected, _ = read(loaded, folder / 'data/class0/0.png')
    Image.fromarray(np.dstack([photo(0), np.full((16, 16), 255, np.uint8)])).save(folder / 'alpha.png')
    Image.fromarray(photo(0)).save(folder / 'image.bmp')
    for name in ('alpha.png', 'image.bmp'):
        assert torch.equal(read(loaded, folder / name)[0], expected), name
    sideways = Image.fromarray(np.rot90(photo(0)))  # 6: to be turned by 90 degrees to the right
    exif = sideways.getexif()
    exif[274] = 6
    sideways.save(folder / 'sideways.png', exif=exif)
    assert torch.equal(read(loaded, folder / 'sideways.png')[0], expected)
    levels = np.arange(256, dtype=np.uint16).reshape(16, 16)
    Image.fromarray(levels * 257).save(folder / 'deep.png')
    assert np.array_equal(read(loaded, folder / 'deep.png')[1][..., 0], levels)


def test_images_that_cannot_be_read(folder):
    loaded = load(folder)
    (folder / 'broken.png').write_text('no image')
    np.save(folder / 'array.npy', photo(0))
    for path, error, message in (
        (folder / 'broken.png', ValueError, 'broken.png cannot be read as an image'),
        (folder / 'none.png', ValueError, 'none.png cannot be read as an image .*No such file'),
        ('6', ValueError, 'image 6 must be a file, or below 6, the size of the test set'),
        (folder / 'array.npy', ValueError, 'array.npy cannot be read as an image .*: give a file such as PNG or JPEG'),
    ):
        with pytest.raises(error, match=message):
            read(loaded, path)


def test_configs_and_checkpoints_that_do_not_do(folder, repository):
    with pytest.raises(FileNotFoundError, match='none.pth'):
        ConfigModel(str(folder / 'config.py'), str(folder / 'none.pth'))
    with pytest.raises(ValueError, match='model.pth does not fit the model of .*: .* mismatch for .* …'):
        ConfigModel(str(repository / 'configs/sa_learned_digits.py'), str(folder / 'model.pth'))
    with pytest.raises(ValueError, match='KeyError: SAQuadratik is not in the .* registry'):
        load(folder, **{'model.backbone.type': 'SAQuadratik'})
    with pytest.raises(ValueError, match='test set of .* cannot be read .*: give --images FOLDER'):
        load(folder, **{'test_dataloader.dataset.data_root': 'nowhere'}).images(None, 3)
    with pytest.raises(ValueError, match='has no test_dataloader'):
        read(load(folder, test_dataloader=None), folder / 'data/class0/0.png')
