//! [`ClientCertificate`], by whose key a client is identified, and [`ClientAuthorities`], which certify clients' names.

use crate::Fingerprint;
use rustls::pki_types::{CertificateDer, TrustAnchor, UnixTime, pem::PemObject};
use std::{fmt, sync::Arc, time::Duration};

/// The maximum number of intermediate certificates. Those with equal names are tried in every order, so longer chains
/// are expensive to verify and cheap to send, by clients that are not authenticated yet.
const INTERMEDIATES_MAX: usize = 2;

/// The certificate chain of a client that proved possession of the certified key. Nothing else in the chain is verified
/// yet.
#[derive(Clone, PartialEq, Eq)]
pub struct ClientCertificate {
    key: Fingerprint,
    /// The client's own certificate first, then intermediate ones.
    chain: Arc<[CertificateDer<'static>]>,
}

impl ClientCertificate {
    /// Reads a chain, the client's own certificate first; `None` if that one is missing or invalid.
    pub fn new(chain: &[CertificateDer<'_>]) -> Option<Self> {
        let certificate = webpki::EndEntityCert::try_from(chain.first()?).ok()?;
        let key = Fingerprint::of(&certificate.subject_public_key_info());
        Some(Self { key, chain: chain.iter().map(|certificate| certificate.clone().into_owned()).collect() })
    }

    /// The fingerprint of the client's key.
    pub fn key(&self) -> Fingerprint {
        self.key
    }
}

impl fmt::Debug for ClientCertificate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ClientCertificate({})", self.key)
    }
}

/// The certificate authorities for clients that are identified by the names in their certificates. Equality compares
/// the certificates.
#[derive(Clone, Default)]
pub struct ClientAuthorities {
    certificates: Vec<CertificateDer<'static>>,
    anchors: Vec<TrustAnchor<'static>>,
}

/// Why a text is not a list of authorities.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("it is not a list of certificates in PEM: {0}")]
pub struct AuthoritiesError(String);

impl ClientAuthorities {
    /// Reads a list of certificates in PEM.
    ///
    /// # Errors
    /// [`AuthoritiesError`] when there is no certificate, or one is invalid.
    pub fn from_pem(pem: &str) -> Result<Self, AuthoritiesError> {
        let wrong = |error: &dyn fmt::Display| AuthoritiesError(error.to_string());
        let certificates = CertificateDer::pem_slice_iter(pem.as_bytes()).collect::<Result<Vec<_>, _>>();
        let certificates = certificates.map_err(|error| wrong(&error))?;
        if certificates.is_empty() {
            return Err(wrong(&"it contains no certificate"));
        }
        let anchor =
            |certificate| webpki::anchor_from_trusted_cert(certificate).map(|anchor| anchor.to_owned());
        let anchors = certificates.iter().map(anchor).collect::<Result<_, _>>();
        Ok(Self { anchors: anchors.map_err(|error| wrong(&error))?, certificates })
    }

    /// The DNS names and URIs of a client, prefixed by `dns:` and `uri:`, if its certificate was issued for client
    /// authentication by one of these authorities, directly or through at most two intermediate ones, and is valid at `now_s`, in seconds since 1970. `None` for any other client. Does not check revocation lists.
    pub fn names_of(&self, client: &ClientCertificate, now_s: u64) -> Option<Vec<String>> {
        let (certificate, others) = client.chain.split_first()?;
        if self.anchors.is_empty() || others.len() > INTERMEDIATES_MAX {
            return None;
        }
        let certificate = webpki::EndEntityCert::try_from(certificate).ok()?;
        let verified = certificate.verify_for_usage(
            webpki::ALL_VERIFICATION_ALGS,
            &self.anchors,
            others,
            UnixTime::since_unix_epoch(Duration::from_secs(now_s)),
            webpki::KeyUsage::client_auth(),
            None,
            None,
        );
        verified.ok()?;
        let dns_names = certificate.valid_dns_names().map(|name| format!("dns:{name}"));
        Some(
            dns_names
                .chain(certificate.valid_uri_names().map(|uri| format!("uri:{uri}")))
                .collect(),
        )
    }
}

impl PartialEq for ClientAuthorities {
    fn eq(&self, other: &Self) -> bool {
        self.certificates == other.certificates
    }
}

impl Eq for ClientAuthorities {}

impl fmt::Debug for ClientAuthorities {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ClientAuthorities({})", self.certificates.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcgen::{
        BasicConstraints, CertificateParams, CertifiedIssuer, ExtendedKeyUsagePurpose, IsCa, KeyPair,
        SanType, date_time_ymd,
    };

    fn authority(name: &str) -> CertifiedIssuer<'static, KeyPair> {
        let mut params = CertificateParams::new(vec![name.to_owned()]).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(rcgen::DnType::CommonName, name);
        CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap()
    }

    fn client(issuer: &CertifiedIssuer<'_, KeyPair>, usage: ExtendedKeyUsagePurpose) -> ClientCertificate {
        let mut params = CertificateParams::new(vec!["gpu-1.example".to_owned()]).unwrap();
        let uri = "spiffe://cluster/ns/serving/gpu-1".try_into().unwrap();
        params.subject_alt_names.push(SanType::URI(uri));
        params.extended_key_usages = vec![usage];
        (params.not_before, params.not_after) = (date_time_ymd(2020, 1, 1), date_time_ymd(2030, 1, 1));
        let certificate = params.signed_by(&KeyPair::generate().unwrap(), issuer).unwrap();
        ClientCertificate::new(&[certificate.der().clone()]).unwrap()
    }

    /// 2025-01-01, within the validity of the certificates.
    const WITHIN: u64 = 1_735_689_600;
    /// 2031-01-01, after it.
    const AFTER: u64 = 1_924_992_000;

    #[test]
    fn a_client_is_identified_by_its_certified_names() {
        let (ours, theirs) = (authority("ours"), authority("theirs"));
        let trusted = ClientAuthorities::from_pem(&ours.pem()).unwrap();
        let good = client(&ours, ExtendedKeyUsagePurpose::ClientAuth);
        let names = ["dns:gpu-1.example", "uri:spiffe://cluster/ns/serving/gpu-1"]
            .map(str::to_owned)
            .to_vec();
        assert_eq!(trusted.names_of(&good, WITHIN), Some(names));
        assert_eq!(trusted.names_of(&good, AFTER), None, "it has expired");
        let foreign = client(&theirs, ExtendedKeyUsagePurpose::ClientAuth);
        assert_eq!(trusted.names_of(&foreign, WITHIN), None, "of another authority");
        let server = client(&ours, ExtendedKeyUsagePurpose::ServerAuth);
        assert_eq!(trusted.names_of(&server, WITHIN), None, "for servers");
        assert_eq!(ClientAuthorities::default().names_of(&good, WITHIN), None);
        let with_others = |count: usize| {
            let chain = [&good.chain[..], &vec![theirs.der().clone(); count]].concat();
            trusted.names_of(&ClientCertificate::new(&chain).unwrap(), WITHIN)
        };
        assert!(with_others(2).is_some() && with_others(3).is_none(), "a long chain is not verified");
        let both = ClientAuthorities::from_pem(&format!("{}{}", ours.pem(), theirs.pem())).unwrap();
        assert!(both.names_of(&foreign, WITHIN).is_some() && both != trusted);
    }

    #[test]
    fn invalid_certificates_are_refused() {
        for text in ["", "nonsense", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"] {
            assert!(ClientAuthorities::from_pem(text).is_err(), "{text}");
        }
    }
}
