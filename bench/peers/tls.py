"""A certificate for one run: the source makes it and sends it to the sink, which trusts no other."""

import datetime
import ipaddress
import ssl
import tempfile
from dataclasses import dataclass

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

DAY = datetime.timedelta(days=1)


@dataclass(frozen=True)
class Identity:
    """A private key and its self-signed certificate, both in PEM."""

    certificate: str
    key: str


def identity(ip: str) -> Identity:
    """A new identity for a server at `ip`."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "tensor-relay peer")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - DAY)
        .not_valid_after(now + DAY)
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(ip))]), critical=False
        )
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return Identity(certificate.public_bytes(serialization.Encoding.PEM).decode(), private.decode())


def server_context(own: Identity) -> ssl.SSLContext:
    """A server context for TLS 1.3 only, with this identity."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    with tempfile.NamedTemporaryFile("w") as file:  # Python's ssl loads keys only from files.
        file.write(own.key + own.certificate)
        file.flush()
        context.load_cert_chain(file.name)
    return context


def client_context(certificate: str) -> ssl.SSLContext:
    """A client context for TLS 1.3 only, which trusts only this certificate."""
    context = ssl.create_default_context(cadata=certificate)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context
