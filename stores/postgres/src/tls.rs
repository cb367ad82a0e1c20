//! The encrypted way to a server: whom to trust, and how much is checked of what it shows.

use std::sync::Arc;

use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, Error as TlsError, RootCertStore, SignatureScheme,
};
use taskonce_core::ErrorKind;

use crate::fault::Fault;
use crate::url::{Tls, TlsMode};

/// What the driver needs to encrypt a connection as the URL demands.
pub(crate) fn config(tls: &Tls) -> Result<ClientConfig, Fault> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .map_err(|error| Fault::new(ErrorKind::Unsupported, format!("no TLS here: {error}")))?;
    let checks = match (tls.mode, &tls.roots) {
        (TlsMode::VerifyFull, _) => Checks::Name,
        (TlsMode::VerifyCa, _) => Checks::Authority,
        // As libpq has it: who names authorities wants them checked.
        (TlsMode::Require, Some(_)) => Checks::Authority,
        (TlsMode::Require, None) | (TlsMode::Prefer | TlsMode::Disable, _) => Checks::Nothing,
    };
    let authority = match checks {
        Checks::Nothing => None,
        Checks::Authority | Checks::Name => {
            let roots = Arc::new(roots(tls)?);
            let verifier = WebPkiServerVerifier::builder_with_provider(roots, Arc::clone(&provider)).build();
            Some(verifier.map_err(|error| Fault::new(ErrorKind::BadUrl, format!("`sslrootcert`: {error}")))?)
        }
    };
    let verifier = Verifier { checks, authority, provider };
    let builder = builder.dangerous().with_custom_certificate_verifier(Arc::new(verifier));
    match &tls.own {
        None => Ok(builder.with_no_client_auth()),
        Some((certificate, key)) => {
            let bad = |what: &str| Fault::new(ErrorKind::BadUrl, format!("`{what}` cannot be used"));
            let chain = CertificateDer::pem_slice_iter(certificate)
                .collect::<Result<Vec<_>, _>>()
                .map_err(|_| bad("sslcert"))?;
            let key = PrivateKeyDer::from_pem_slice(key).map_err(|_| bad("sslkey"))?;
            builder.with_client_auth_cert(chain, key).map_err(|_| bad("sslkey"))
        }
    }
}

fn roots(tls: &Tls) -> Result<RootCertStore, Fault> {
    let bad = |what: &str| Fault::new(ErrorKind::BadUrl, format!("`sslrootcert` holds a certificate that {what}"));
    let mut roots = RootCertStore::empty();
    match &tls.roots {
        None => roots.extend(webpki_roots::TLS_SERVER_ROOTS.iter().cloned()),
        Some(pem) => {
            for certificate in CertificateDer::pem_slice_iter(pem) {
                let certificate = certificate.map_err(|_| bad("cannot be read"))?;
                roots.add(certificate).map_err(|_| bad("cannot be trusted"))?;
            }
        }
    }
    Ok(roots)
}

/// What is checked of a server's certificate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Checks {
    /// Only that the server holds its key.
    Nothing,
    /// That an authority that is trusted has signed it.
    Authority,
    /// That too, and that it names the host.
    Name,
}

#[derive(Debug)]
struct Verifier {
    checks: Checks,
    authority: Option<Arc<WebPkiServerVerifier>>,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, TlsError> {
        let Some(authority) = &self.authority else { return Ok(ServerCertVerified::assertion()) };
        let checked = authority.verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now);
        match checked {
            Err(TlsError::InvalidCertificate(
                CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
            )) if self.checks == Checks::Authority => Ok(ServerCertVerified::assertion()),
            checked => checked,
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, TlsError> {
        verify_tls12_signature(message, cert, dss, &self.provider.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, TlsError> {
        verify_tls13_signature(message, cert, dss, &self.provider.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}
