"""Keys and certificates of a federation.

The SuperLink presents a certificate signed by our own authority, whose root certificate every site has; so sites can
authenticate the server. A site proves possession of a private key (NIST curve P-384) whose public key was registered
with the SuperLink; so the server can authenticate the site.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA384
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_ssh_public_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedfa.errors import ConfigError, FedfaError
from fedfa.experiment.config import read_toml


@dataclass(frozen=True)
class ServerKeys:
    """Files for the SuperLink."""

    authority: Path
    """The root certificate; every site gets a copy."""
    certificate: Path
    key: Path


@dataclass(frozen=True)
class NodeKey:
    """Files of one site."""

    private: Path
    public: Path
    """In OpenSSH's one-line format, for the operator of the SuperLink."""


def make_server_keys(folder: Path, hosts: Sequence[str], days: int = 365) -> ServerKeys:
    """Make an authority and a certificate for the server.

    The authority's private key signs this one certificate and is discarded, so nobody can make another certificate that
    the sites would trust. For a new server certificate make a new authority and distribute its root certificate.

    Args:
        folder: Directory for ``ca.crt``, ``server.pem`` and ``server.key``.
        hosts: Names and addresses under which sites reach the server.
        days: Validity of the certificates.
    """
    if not hosts:
        raise FedfaError("a server certificate needs at least one host name or address")
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    start = datetime.now(UTC) - timedelta(minutes=5)  # clocks of sites differ
    authority_key, server_key = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
    builder = x509.CertificateBuilder().not_valid_before(start).not_valid_after(start + timedelta(days=days))
    signs_only = x509.KeyUsage(
        digital_signature=False, content_commitment=False, key_encipherment=False, data_encipherment=False,
        key_agreement=False, key_cert_sign=True, crl_sign=True, encipher_only=False, decipher_only=False,
    )  # fmt: skip
    identifier = x509.SubjectKeyIdentifier.from_public_key(authority_key.public_key())
    authority = _signed(
        builder.subject_name(_common_name("fedfa authority"))
        .issuer_name(_common_name("fedfa authority"))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(signs_only, critical=True)
        .add_extension(identifier, critical=False),
        authority_key,
        authority_key,
    )
    server = _signed(
        builder.subject_name(_common_name(hosts[0][:64]))
        .issuer_name(authority.subject)
        .add_extension(x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False),
        server_key,
        authority_key,
    )
    files = ServerKeys(folder / "ca.crt", folder / "server.pem", folder / "server.key")
    _write(files.authority, authority.public_bytes(Encoding.PEM), secret=False)
    _write(files.certificate, server.public_bytes(Encoding.PEM), secret=False)
    _write(files.key, server_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), secret=True)
    return files


def make_node_key(folder: Path, name: str) -> NodeKey:
    """Make the key of one site: ``NAME`` (private, stays at the site) and ``NAME.pub`` (to be registered)."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    key = ec.generate_private_key(ec.SECP384R1())
    files = NodeKey(folder / name, folder / f"{name}.pub")
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    _write(files.private, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()), secret=True)
    _write(files.public, public + f" {name}\n".encode(), secret=False)
    return files


def site_keys(path: Path) -> dict[int, bytes]:
    """Read which key belongs to which site: TOML lines ``0 = "clinic-a.pub"``, files beside this one or absolute.

    Returns:
        Public keys by number, in the form in which Flower lists them.

    Raises:
        ConfigError: The file, or a key that it names, cannot be read, or two numbers have the same key.
    """
    found: dict[int, bytes] = {}
    for number, name in read_toml(path).items():
        try:
            key = load_ssh_public_key((path.parent / str(name)).read_bytes())
            found[int(number)] = key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}: {number} = {name!r} is not the public key of a site: {error}") from None
    if len(set(found.values())) < len(found):
        raise ConfigError(f"{path}: two sites have the same key; each needs its own")
    return found


def _signed(
    builder: x509.CertificateBuilder, key: ec.EllipticCurvePrivateKey, signer: ec.EllipticCurvePrivateKey
) -> x509.Certificate:
    return builder.public_key(key.public_key()).serial_number(x509.random_serial_number()).sign(signer, SHA384())


def _common_name(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _host(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _write(path: Path, content: bytes, *, secret: bool) -> None:
    """Write a new file; an existing key is never overwritten."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if secret else 0o644)
    except FileExistsError:
        raise FedfaError(f"{path} exists already; keys are never overwritten: choose another directory") from None
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
