"""SHA-256 of the arrays of the known data sets, as stored: ``uint8 [N, H, W, C]`` and little-endian ``int64``."""

from __future__ import annotations

from collections.abc import Mapping

CHECKSUMS: Mapping[str, Mapping[str, str]] = {
    "fashion-mnist": {
        "train.inputs": "2e487a6c89124f78f2d7521542223cafe96f7123c3ca13d447772ac6ecbb3012",
        "train.labels": "e3245b63f7c40d1c8b652835f19744d970c1613b40ddac6bcfc87b9c46e16a0b",
        "test.inputs": "c867c93ff95360594e8ec3287995350b824dd110b11595c0e13d5423f621867a",
        "test.labels": "d51d859896c55775b9e9e219b77ff03bcec1b6ac322f313544dc3f9e7bc94fae",
    },
    "mnist": {
        "train.inputs": "741c988805d008ac6e4c904b69001ba184c24b2c540a4ef403f4c71b676cf757",
        "train.labels": "e474323ac02fc156161b0bbb1f8c9cfeb327a74bcd9f9680a8385269a24f566c",
        "test.inputs": "6d87418db22cc8025d05968bec9bd5c3932904b23485740db143a061a2c9d161",
        "test.labels": "2fd8de6bdb8d11780b4b96dc57847bcfe6953f7c32aa48bfcd8237c3b7847243",
    },
    "cifar10": {
        "train.inputs": "47af8b02cfcfb6cdf3dbbd1969ad7f1b70f4413f6f80f437b020ee4e5bc8304a",
        "train.labels": "f5cfe00b0f00968c0cc5ff3b1d2de51b10e33efa277c2986f4e0fa63e58c9f4f",
        "test.inputs": "f9b1e2130bab680db56eb06d886f7f1ad0f1183907ceff4659d1735c890f5b04",
        "test.labels": "cbb7365de8ed11f05cc4c3a1e7f78144127c5e851efd83762fb18202461230bb",
    },
    "digits": {
        "train.inputs": "503377f9cfaca149d5f4766a565f241ffa34779a6052ed8f96ddd783e9ed34eb",
        "train.labels": "9313721fa010b4068efd8523f8b0ad55e16fe55564ccc54da13abb96858f7b54",
        "test.inputs": "747b8e40cc4d21a26c27e6681d6b5641b1d1c96162f713457890ca5ee65f561d",
        "test.labels": "ee6ec0ae7823271abdaa9092fefe38ec720e2d13d041a0541dbd4099bda0fc56",
    },
    "usps": {
        "train.inputs": "b3aea71639e9f07b0000e170f269551297d36369654afbe43330a543ceeb8e5e",
        "train.labels": "d2205a402e10ef9785bcb548e666f1fdc5d719287eac6d14327f77964ca173c1",
        "test.inputs": "418e84c15696e0dc49487494268870b9c65670c1539d487d775caeea7877b253",
        "test.labels": "83d5538087f38b4aa9a64e4c69e47ae24d1b4eaa601c3d41c4a32d7c2739d831",
    },
    "svhn": {
        "train.inputs": "896b125a66c1f05932ce4670fd53f2d486a001003cf2dba727400469a261d9ef",
        "train.labels": "65bd029111c5598e8d2fbb49dbc7d9eb6718aefc1f03a6ff78e1b409553e6f65",
        "test.inputs": "e84600597f44c1f7717ff8e23767e57a6b96b5225758890a2227b7b4cdb5f6b5",
        "test.labels": "59e86e8d489b6ff0a1a330668385386f8e9e908164953545a3965359cbdb53a6",
    },
    "mnist-m": {
        "train.inputs": "c96e5524ab2343cb14afa81ac9c5361855ced5827926cf071ba9e34680da5891",
        "train.labels": "f4ede5bc57ebd2d50ec8be7ac0d4c6ef9f7ba0917d3e04ec1390472ce5d519e6",
        "test.inputs": "516115ae4b0a91adcb162c731db02e62f0e8fc5b6a21c4b82f23d93ea390679e",
        "test.labels": "d7014c4102d1fd0ab3de59e33a0c9ff6687f376be66580efc215a8b144b3020f",
    },
    "chars74k-digits": {
        "train.inputs": "44c8a3d4745e8c4ed7fa02c8f891ccfeb790b37bc567d872add36bb616abf0fd",
        "train.labels": "4e4ab1eba202a0e90a7cdcc070edcce4086dc943907e1413ecf57c47e19633ca",
        "train.writers": "100ee4ccf3744d3c7000ce9e37337da82cfca8e28f32ab7b8277697ac7bc7794",
        "test.inputs": "5fcbacc8e64288704f5b4c0b0a7ba7ec8af6b59c98ebc356f51ee65b9d4d3fcb",
        "test.labels": "cf88adddbee333c6c899e5fb3b85654f7e19e2a47eb1e6d1acf2173ee40fd118",
        "test.writers": "b5a9727f91ff8d2099a955d671d307cd1edae0a943197ece812c4b19f0a76001",
    },
    "mnist-writers": {
        "train.inputs": "741c988805d008ac6e4c904b69001ba184c24b2c540a4ef403f4c71b676cf757",
        "train.labels": "e474323ac02fc156161b0bbb1f8c9cfeb327a74bcd9f9680a8385269a24f566c",
        "train.writers": "99c8265f8bbd614a02fbc853fb641c61dfdcd2166fc083832d57f24e4cb01af6",
        "test.inputs": "6d87418db22cc8025d05968bec9bd5c3932904b23485740db143a061a2c9d161",
        "test.labels": "2fd8de6bdb8d11780b4b96dc57847bcfe6953f7c32aa48bfcd8237c3b7847243",
        "test.writers": "f1acbcaf2589e1daa3682b300868262fafc7bbc60eb39e812c213b67e11b7d3f",
    },
    "synth-digits": {
        "train.inputs": "dab64bd8069ad1e080ac581506e60e3fa89fbdc2b261be481e1477945836a69b",
        "train.labels": "f4b723a53c892154ccfe38d838fb0fbc8d2b1a67b5aec4d24175524651c4eeb8",
        "test.inputs": "86729ccdfe16e4790af81a2e482385590260f474c7bbf8732a45e6885424a758",
        "test.labels": "c24692bd6ac163e5f035af5e97377ad65e46f5718ee25149c44641edc94957de",
    },
    "mixed-digits": {
        "train.inputs": "1be375082830f1f463782de2cc579d5f108d7e7b34ac2e260de1d562fb7435a5",
        "train.labels": "e67abf5b2befc4a7bb0f9a39308ff7377c8b5b40f7a381164e024dd2a3b41ed1",
        "train.domains": "503af6bb8d5203d27decf0c1ab1642831c168f02cdda3ed1ca50af6c5c4a8084",
        "test.inputs": "53e9594b35fe60acec4cd6b712f9ca8e15f15c1477aba559513bfb2d4e71a560",
        "test.labels": "a3f69896d16a192d7e97067d47bbc42090ce07d1c0bf6f405a999ad48966b909",
        "test.domains": "c8909c3633a467a5c49c97a0cc1d6493c762958edfef15e424a9fc1deacf399a",
    },
}
