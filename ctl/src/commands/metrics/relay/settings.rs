//! The settings of the relay: the web config, and the certificates that it names.

use std::{
    fs,
    io::{self, Read as _},
    net::SocketAddr,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    sync::Arc,
};

use gpush_api::{ApiError, Code};
use gpush_core::web_config::{self, ClientCertificate, WebConfig};
use rustls::ServerConfig;

use super::{
    protection,
    tls::{self, unreadable},
};

/// Where the settings come from.
#[derive(Debug)]
pub(super) struct SettingsSource {
    /// The web config, if there is one.
    pub(super) web_config: Option<PathBuf>,
    /// The address, which decides what the web config must have.
    pub(super) listen: SocketAddr,
}

/// The settings in use.
#[derive(Debug, Default)]
pub(super) struct RelaySettings {
    /// The web config.
    pub(super) config: WebConfig,
    /// Certificates and keys, if the relay uses TLS.
    pub(super) tls: Option<Arc<ServerConfig>>,
}

impl RelaySettings {
    /// Returns which protection these settings have and `new` does not: `TLS and passwords`.
    pub(super) fn protection_lost_in(&self, new: &Self) -> Option<&'static str> {
        let tls = self.tls.is_some() && new.tls.is_none();
        let passwords = self.config.has_password() && !new.config.has_password();
        match (tls, passwords) {
            (true, true) => Some("TLS and passwords"),
            (true, false) => Some("TLS"),
            (false, true) => Some("passwords"),
            (false, false) => None,
        }
    }
}

/// New settings.
#[derive(Debug, Default)]
pub(super) struct Loaded {
    pub(super) settings: RelaySettings,
    /// Faults that do not prevent the relay from working.
    pub(super) warnings: Vec<ApiError>,
}

impl SettingsSource {
    /// Reads the web config and its files. Before each file, takes its stamp, also if the file is then invalid. So a
    /// change during the reading is noticed, and so is the correction of an invalid file.
    ///
    /// # Errors
    /// A file cannot be read or is invalid, or the address needs settings that the web config does not have.
    pub(super) fn load(&self, stamps: &mut Stamps) -> Result<Loaded, ApiError> {
        *stamps = Stamps::default();
        let Some(path) = &self.web_config else {
            web_config::check_address(self.listen, None)?;
            return Ok(Loaded::default());
        };
        let name = path.display().to_string();
        stamps.add([path.clone()]);
        protection::check(path)?;
        let bytes = read(path).map_err(|error| unreadable(path, &error))?;
        let config = WebConfig::from_bytes(&bytes, &name).map_err(|errors| ApiError::from(&errors))?;
        web_config::check_address(self.listen, Some((&config, &name)))?;
        let mut warnings = Vec::new();
        if config.has_password() {
            warnings.extend(readable_by_all(path, "the password hashes in"));
        }
        let tls = match &config.tls {
            Some(settings) => {
                let mut files = vec![settings.cert_file.clone(), settings.key_file.clone()];
                files.extend(match &settings.client_certificate {
                    ClientCertificate::IfGiven(file) | ClientCertificate::Required(file) => Some(file.clone()),
                    ClientCertificate::None => None,
                });
                stamps.add(files.iter().cloned());
                files.iter().try_for_each(|file| protection::check(file))?;
                warnings.extend(readable_by_all(&settings.key_file, "the private key"));
                Some(Arc::new(tls::server_config(settings)?))
            }
            None => None,
        };
        Ok(Loaded { settings: RelaySettings { config, tls }, warnings })
    }
}

impl SettingsSource {
    /// Returns the error that a changed web config lacks protection that the relay has.
    pub(super) fn unprotected(&self, lost: &str) -> ApiError {
        let name = self.web_config.as_ref().map_or_else(String::new, |path| format!(" {}", path.display()));
        let what = format!("the web config{name} has no {lost} any more");
        ApiError::new(Code::ConfigInvalid, what).hint("to serve without them, restart the relay")
    }
}

fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    // Read one byte more than permitted, so that a file that is too large causes an error.
    fs::File::open(path)?.take(web_config::MOST_BYTES as u64 + 1).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Returns a warning if every user of the host can read a secret file.
fn readable_by_all(path: &Path, what: &str) -> Option<ApiError> {
    let mode = fs::metadata(path).ok()?.mode();
    let at = path.display();
    (mode & 0o004 != 0).then(|| {
        ApiError::new(Code::ConfigInvalid, format!("every user of this host can read {what} {at}"))
            .hint(format!("`chmod o-r {at}`"))
    })
}

/// Identity and time of each file when it was read.
#[derive(Debug, Default)]
pub(super) struct Stamps(Vec<(PathBuf, Option<Stamp>)>);

/// Device, inode, size, and the time of the last change in seconds and nanoseconds.
type Stamp = (u64, u64, u64, i64, i64);

fn stamp(path: &Path) -> Option<Stamp> {
    let of = fs::metadata(path).ok()?;
    Some((of.dev(), of.ino(), of.size(), of.ctime(), of.ctime_nsec()))
}

impl Stamps {
    fn add(&mut self, files: impl IntoIterator<Item = PathBuf>) {
        self.0.extend(files.into_iter().map(|file| {
            let stamp = stamp(&file);
            (file, stamp)
        }));
    }

    /// Returns whether a file has changed.
    pub(super) fn have_changed(&self) -> bool {
        self.0.iter().any(|(file, before)| stamp(file) != *before)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn replaced_changed_and_removed_files_have_changed() {
        let scratch = tempfile::tempdir().unwrap();
        let file = scratch.path().join("web.yml");
        fs::write(&file, "one").unwrap();
        let stamps = || {
            let mut stamps = Stamps::default();
            stamps.add([file.clone()]);
            assert!(!stamps.have_changed());
            stamps
        };
        let before = stamps();
        fs::write(&file, "longer").unwrap();
        assert!(before.have_changed());
        let before = stamps();
        let other = scratch.path().join("other");
        fs::write(&other, "longer").unwrap();
        fs::rename(&other, &file).unwrap();
        assert!(before.have_changed(), "another file with the same size");
        let before = stamps();
        fs::remove_file(&file).unwrap();
        assert!(before.have_changed());
        let before = stamps();
        fs::write(&file, "back").unwrap();
        assert!(before.have_changed());
    }

    #[test]
    fn warning_names_a_secret_file_that_all_users_can_read() {
        let scratch = tempfile::tempdir().unwrap();
        let file = scratch.path().join("key.pem");
        fs::write(&file, "").unwrap();
        for (mode, is_reported) in [(0o640, false), (0o600, false), (0o644, true), (0o604, true)] {
            fs::set_permissions(&file, fs::Permissions::from_mode(mode)).unwrap();
            let warning = readable_by_all(&file, "the private key");
            assert_eq!(warning.is_some(), is_reported, "{mode:o}");
            assert!(warning.is_none_or(|warning| warning.hint.unwrap().contains("chmod o-r ")));
        }
    }

    #[test]
    fn address_without_protection_is_refused_before_listening() {
        let scratch = tempfile::tempdir().unwrap();
        let web_config = scratch.path().join("web.yml");
        fs::write(&web_config, "").unwrap();
        let load = |listen: &str, web_config: Option<&PathBuf>| {
            let source = SettingsSource { web_config: web_config.cloned(), listen: listen.parse().unwrap() };
            source.load(&mut Stamps::default())
        };
        load("127.0.0.1:0", None).unwrap();
        load("127.0.0.1:0", Some(&web_config)).unwrap();
        for source in [None, Some(&web_config)] {
            let error = load("0.0.0.0:0", source).unwrap_err();
            assert!(error.message.contains("needs TLS and a password"), "{error:?}");
        }
    }
}
