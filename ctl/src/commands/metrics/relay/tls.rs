//! TLS of the relay: certificates, keys and versions.

use std::{io, path::Path, sync::Arc};

use gpush_api::{ApiError, Code};
use gpush_core::web_config::{ClientCertificate, TlsSettings, TlsVersion};
use rustls::{
    RootCertStore, ServerConfig, SupportedProtocolVersion,
    pki_types::{
        CertificateDer, PrivateKeyDer,
        pem::{self, PemObject},
    },
    server::WebPkiClientVerifier,
    version::{TLS12, TLS13},
};

use crate::exit;

/// Reads the certificate and the key.
///
/// # Errors
/// A file cannot be read or has no certificate or key, or the key does not belong to the certificate.
pub(super) fn server_config(settings: &TlsSettings) -> Result<ServerConfig, ApiError> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let versions: &[&SupportedProtocolVersion] = match settings.min_version {
        TlsVersion::V12 => &[&TLS13, &TLS12],
        TlsVersion::V13 => &[&TLS13],
    };
    let certificates = certificates(&settings.cert_file)?;
    let key = PrivateKeyDer::from_pem_file(&settings.key_file)
        .map_err(|error| invalid_pem(&settings.key_file, "private key", error))?;
    let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
        .with_protocol_versions(versions)
        .map_err(|error| ApiError::new(Code::Internal, "cannot set the TLS versions").cause(error.to_string()))?;
    let builder = match &settings.client_certificate {
        ClientCertificate::None => builder.with_no_client_auth(),
        ClientCertificate::IfGiven(file) | ClientCertificate::Required(file) => {
            let mut roots = RootCertStore::empty();
            for certificate in self::certificates(file)? {
                roots.add(certificate).map_err(|error| unusable(file, &error))?;
            }
            let mut verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider);
            if matches!(settings.client_certificate, ClientCertificate::IfGiven(_)) {
                verifier = verifier.allow_unauthenticated();
            }
            builder.with_client_cert_verifier(verifier.build().map_err(|error| unusable(file, &error))?)
        }
    };
    let mut config = builder.with_single_cert(certificates, key).map_err(|error| {
        let (certificate, key) = (settings.cert_file.display(), settings.key_file.display());
        let what = format!("cannot use the certificate {certificate} with the key {key}");
        let hint =
            "name the key of this certificate; `openssl x509 -noout -text -in CERTIFICATE` shows the certificate";
        let cause = match error {
            rustls::Error::InconsistentKeys(_) => "the key does not belong to the certificate".to_owned(),
            other => other.to_string(),
        };
        ApiError::new(Code::BadRequest, what).cause(cause).hint(hint)
    })?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(config)
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, ApiError> {
    let invalid = |error| invalid_pem(path, "certificate", error);
    let found =
        CertificateDer::pem_file_iter(path).map_err(invalid)?.collect::<Result<Vec<_>, _>>().map_err(invalid)?;
    if found.is_empty() { Err(invalid_pem(path, "certificate", pem::Error::NoItemsFound)) } else { Ok(found) }
}

/// Returns the error for a file without a certificate or key. Its text contains nothing of the file.
fn invalid_pem(path: &Path, what: &str, error: pem::Error) -> ApiError {
    let cause = match error {
        pem::Error::Io(cause) => return unreadable(path, &cause),
        pem::Error::NoItemsFound => format!("the file has no {what}"),
        _ => "the file is not valid PEM".to_owned(),
    };
    ApiError::new(Code::BadRequest, format!("cannot read a {what} from {}", path.display()))
        .cause(cause)
        .hint(format!("name a file in PEM with a {what}, without a passphrase"))
}

fn unusable(path: &Path, cause: &dyn std::error::Error) -> ApiError {
    ApiError::new(Code::BadRequest, format!("cannot use the certificates in {}", path.display()))
        .cause(cause.to_string())
        .hint("name a file in PEM with the certificates of the issuers of client certificates")
}

/// Returns the error for the web config, or a file that it names, if the file cannot be read.
pub(super) fn unreadable(path: &Path, cause: &io::Error) -> ApiError {
    let error = exit::io(format!("cannot read {}", path.display()), cause);
    match cause.kind() {
        io::ErrorKind::PermissionDenied => error.hint(format!(
            "the unit runs as the user gpush-metrics: `chgrp gpush-metrics {0} && chmod 640 {0}`",
            path.display()
        )),
        _ => error.hint("correct `--web-config`, or the path in the web config"),
    }
}
