"""Keys of one session, and what is derived from pairs of them. All primitives are those of ``cryptography``.

Every derived key is bound to the session (run, round, attempt) and to the two clients, so nothing of one round is of
use in another.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

KEY_BYTES = 32


def public_key(private: bytes) -> bytes:
    """The X25519 public key of a private one."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def agreed_key(private: bytes, public: bytes, purpose: str, session: bytes, pair: tuple[int, int]) -> bytes:
    """The key that two clients share: X25519, then HKDF-SHA256; the same for both."""
    secret = X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(public))
    first, second = sorted(pair)
    info = b"fedfa secure sum\x00" + purpose.encode() + b"\x00" + session + f"\x00{first}\x00{second}".encode()
    return HKDF(hashes.SHA256(), KEY_BYTES, salt=None, info=info).derive(secret)


def mask(key: bytes, length: int) -> np.ndarray:
    """Uniform numbers modulo 2⁶⁴ from a key that is used once: the ChaCha20 key stream."""
    encryptor = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()
    return np.frombuffer(encryptor.update(bytes(8 * length)), dtype="<u8").astype(np.uint64)


def commitment(seed: bytes, session: bytes, client: int) -> bytes:
    """Binds a client to a random seed without telling it."""
    return hashlib.sha256(b"fedfa seed\x00" + session + f"\x00{client}\x00".encode() + seed).digest()


def sealed(key: bytes, sender: int, receiver: int, content: bytes, session: bytes) -> bytes:
    """AES-GCM encryption for one receiver. The key is used once in each direction, so the nonce is the direction."""
    nonce = sender.to_bytes(6, "big") + receiver.to_bytes(6, "big")
    return AESGCM(key).encrypt(nonce, content, session)


def opened(key: bytes, sender: int, receiver: int, ciphertext: bytes, session: bytes) -> bytes | None:
    """The content, or None if it was not sealed by the sender for this receiver and session."""
    nonce = sender.to_bytes(6, "big") + receiver.to_bytes(6, "big")
    try:
        return AESGCM(key).decrypt(nonce, ciphertext, session)
    except InvalidTag:
        return None


@dataclass(frozen=True)
class Identity:
    """A site's long-lived signing key; with the public keys of all sites, the server cannot slip in keys of its own."""

    private: Ed25519PrivateKey

    def sign(self, content: bytes) -> bytes:
        """A signature."""
        return self.private.sign(content)

    @staticmethod
    def verify(public: Ed25519PublicKey, signature: bytes, content: bytes) -> bool:
        """Whether the holder of the private key signed the content."""
        try:
            public.verify(signature, content)
        except InvalidSignature:
            return False
        return True
