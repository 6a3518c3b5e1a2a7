"""Keys and certificates of a federation.

The SuperLink shows a certificate, signed by a small authority of our own, whose root every site knows; so a site knows
that it talks to the right server. A site shows that it knows the private part of a key (NIST curve P-384) whose public
part was registered with the SuperLink; so the server knows the site.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from fedfa.errors import FedfaError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.x509 import Certificate, CertificateBuilder, GeneralName


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
    """In OpenSSH's one-line form; goes to whoever runs the SuperLink."""


def make_server_keys(folder: Path, hosts: Sequence[str], days: int = 365) -> ServerKeys:
    """An authority and a certificate for the server.

    The authority's own private key signs this one certificate and is then forgotten: nobody can make another one that
    the sites would trust. For a new server certificate make a new authority and give its root to the sites.

    Args:
        folder: Where the files go: ``ca.crt``, ``server.pem``, ``server.key``.
        hosts: Names and addresses under which sites reach the server.
        days: How long the certificates are valid.
    """
    if not hosts:
        raise FedfaError("a server certificate needs at least one host name or address")
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    start = datetime.now(UTC) - timedelta(minutes=5)  # clocks of sites differ
    end = start + timedelta(days=days)

    def named(words: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, words)])

    authority_key, server_key = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
    blank = x509.CertificateBuilder().not_valid_before(start).not_valid_after(end)
    signs_only = x509.KeyUsage(
        digital_signature=False, content_commitment=False, key_encipherment=False, data_encipherment=False,
        key_agreement=False, key_cert_sign=True, crl_sign=True, encipher_only=False, decipher_only=False,
    )  # fmt: skip
    identifier = x509.SubjectKeyIdentifier.from_public_key(authority_key.public_key())
    authority = _signed(
        blank.subject_name(named("fedfa authority"))
        .issuer_name(named("fedfa authority"))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(signs_only, critical=True)
        .add_extension(identifier, critical=False),
        authority_key,
        authority_key,
    )
    server = _signed(
        blank.subject_name(named(hosts[0][:64]))
        .issuer_name(authority.subject)
        .add_extension(x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.ExtendedKeyUsage([x509.oid.ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier),
            critical=False,
        ),
        server_key,
        authority_key,
    )
    files = ServerKeys(folder / "ca.crt", folder / "server.pem", folder / "server.key")
    _write(files.authority, _pem(authority), secret=False)
    _write(files.certificate, _pem(server), secret=False)
    _write(files.key, _private_pem(server_key), secret=True)
    return files


def make_node_key(folder: Path, name: str) -> NodeKey:
    """A key for one site: ``NAME`` (private, stays at the site) and ``NAME.pub`` (to be registered)."""
    from cryptography.hazmat.primitives import serialization as form
    from cryptography.hazmat.primitives.asymmetric import ec

    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    key = ec.generate_private_key(ec.SECP384R1())
    files = NodeKey(folder / name, folder / f"{name}.pub")
    private = key.private_bytes(form.Encoding.PEM, form.PrivateFormat.OpenSSH, form.NoEncryption())
    public = key.public_key().public_bytes(form.Encoding.OpenSSH, form.PublicFormat.OpenSSH)
    _write(files.private, private, secret=True)
    _write(files.public, public + f" {name}\n".encode(), secret=False)
    return files


def _signed(builder: CertificateBuilder, key: EllipticCurvePrivateKey, signer: EllipticCurvePrivateKey) -> Certificate:
    from cryptography import x509
    from cryptography.hazmat.primitives.hashes import SHA384

    return builder.public_key(key.public_key()).serial_number(x509.random_serial_number()).sign(signer, SHA384())


def _host(name: str) -> GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _pem(certificate: Certificate) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding

    return certificate.public_bytes(Encoding.PEM)


def _private_pem(key: EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives import serialization as form

    return key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption())


def _write(path: Path, content: bytes, *, secret: bool) -> None:
    """A new file; never over an existing one, for a key that is lost is lost."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if secret else 0o644)
    except FileExistsError:
        raise FedfaError(f"{path} exists already; keys are never written over: choose another folder") from None
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
