//! The web config of the metrics relay: TLS and passwords, in the form of Prometheus' exporter-toolkit.
//!
//! ```yaml
//! tls_server_config:
//!   cert_file: metrics.crt          # PEM; relative to the directory of this file
//!   key_file: metrics.key
//!   min_version: TLS12              # or TLS13
//!   client_auth_type: NoClientCert  # or VerifyClientCertIfGiven, RequireAndVerifyClientCert
//!   client_ca_file: clients.crt
//! basic_auth_users:
//!   prometheus: $2y$10$…            # bcrypt, as `htpasswd -nBC 10 prometheus` prints it
//! ```
//!
//! A file with an unknown key is refused: a key without an effect could make an administrator believe that the relay is
//! protected. For the same reason, keys of the exporter-toolkit that the relay does not implement are refused too.

mod read;
#[cfg(test)]
mod tests;

use std::{collections::BTreeMap, fmt, net::SocketAddr, path::PathBuf};

use gpush_api::{ApiError, Code};

use crate::diagnostic::FileErrors;

/// Maximum size of a file in bytes.
pub const MOST_BYTES: usize = 1 << 20;

/// A web config.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct WebConfig {
    /// TLS; without it, the relay speaks plain HTTP.
    pub tls: Option<TlsSettings>,
    /// Users with their password hashes. If empty, the relay requires no password.
    pub users: BTreeMap<String, PasswordHash>,
}

/// The settings of TLS.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsSettings {
    /// File with the certificate and its chain, in PEM.
    pub cert_file: PathBuf,
    /// File with the private key, in PEM.
    pub key_file: PathBuf,
    /// The oldest TLS version that the relay accepts.
    pub min_version: TlsVersion,
    /// Whether clients need a certificate.
    pub client_certificate: ClientCertificate,
}

/// A TLS version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TlsVersion {
    /// TLS 1.2.
    V12,
    /// TLS 1.3.
    V13,
}

/// Whether clients need a certificate, and the file with the certificates of its issuers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ClientCertificate {
    /// The relay requests no certificate.
    None,
    /// The relay verifies the certificate of a client that has one.
    IfGiven(PathBuf),
    /// The relay refuses clients without a valid certificate.
    Required(PathBuf),
}

/// A bcrypt hash. `Debug` does not show it.
#[derive(Clone, PartialEq, Eq)]
pub struct PasswordHash(String);

impl PasswordHash {
    /// Returns the hash as text: `$2y$10$…`.
    #[must_use]
    pub fn text(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for PasswordHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PasswordHash(…)")
    }
}

impl WebConfig {
    /// Parses a file. `path` is for messages, and its directory is the base of relative paths in the file.
    ///
    /// # Errors
    /// All problems of the file, with their lines.
    pub fn from_bytes(bytes: &[u8], path: &str) -> Result<Self, FileErrors> {
        read::bytes(bytes, path)
    }

    /// Returns whether clients need a password.
    #[must_use]
    pub fn has_password(&self) -> bool {
        !self.users.is_empty()
    }
}

/// Checks that the relay may listen on an address. An address that other hosts can reach requires TLS and a password.
/// `config` is the web config with its path, if there is one.
///
/// # Errors
/// The missing parts of the web config.
pub fn check_address(address: SocketAddr, config: Option<(&WebConfig, &str)>) -> Result<(), ApiError> {
    if address.ip().to_canonical().is_loopback() {
        return Ok(());
    }
    let (has_tls, has_password) =
        config.map_or((false, false), |(config, _)| (config.tls.is_some(), config.has_password()));
    let missing = match (has_tls, has_password) {
        (true, true) => return Ok(()),
        (false, true) => "`tls_server_config`",
        (true, false) => "`basic_auth_users`",
        (false, false) => "`tls_server_config` and `basic_auth_users`",
    };
    let message =
        format!("cannot serve metrics on {address}: other hosts can reach it, so it needs TLS and a password");
    let error = ApiError::new(Code::BadRequest, message);
    Err(match config {
        Some((_, path)) => error
            .cause(format!("the web config {path} has no {missing}"))
            .hint(format!("add {missing} to {path}, or use `--listen 127.0.0.1:{}`", address.port())),
        None => error.cause("there is no web config").hint(format!(
            "add `--web-config FILE` with a file that has {missing} (example: /usr/share/doc/gpush/examples/web-config.yml), or use \
             `--listen 127.0.0.1:{}`",
            address.port()
        )),
    })
}
