//! The active config. A reload applies all of a new config, or none of it.
//!
//! Most settings take effect at once. The options of the driver worker and the path of the second socket take effect
//! only when gpushd starts again. Until then, gpushd uses the old values, and shows them next to the values in the
//! file.
//!
//! gpushd keeps a copy of the last valid file in its state directory. A gpushd that systemd starts always serves
//! requests:
//!
//! ```text
//! file usable ───────────────────────────────────────► the file
//! file unusable ─┬─ copy usable ─────────────────────► the copy: daemons and leases of users keep their rules
//!                ├─ no copy, and gpushd never ran ───► no rules: gpushd manages no GPU
//!                └─ otherwise ───────────────────────► the rules are not known: gpushd holds all GPUs
//! ```
//!
//! | file | subject |
//! |---|---|
//! | `file` | reads the config file, and checks who can have written it |
//! | `copy` | the copy of the last valid file |

mod copy;
mod file;

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use gpush_api::{ApiError, PendingRestart};
use gpush_core::config::{Config, NamedAccount, accounts_in};
use gpush_locked::Locked;

use self::copy::{ConfigCopy, CopyError};
pub(crate) use self::file::ConfigLoadError;
use crate::system::options::Trust;

/// What gpushd does while the rules are not known.
const WITHOUT_RULES: &str =
    "gpushd does not know its rules, so all GPUs are held: gpushd changes no GPU and grants no lease";

/// The active config and its origin. A handle, cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Settings(Arc<SettingsParts>);

#[derive(Debug)]
struct SettingsParts {
    path: PathBuf,
    must_exist: bool,
    trust: Trust,
    /// The copy of the last valid file. A gpushd that a user started has no copy.
    copy: Option<ConfigCopy>,
    state: Locked<CurrentSettings>,
}

#[derive(Debug)]
struct CurrentSettings {
    config: Arc<Config>,
    source: Source,
    /// The error of the last start or reload; `None` if the file was loaded.
    trouble: Option<ApiError>,
    /// Settings whose new value in the file takes effect only after a restart.
    pending: Vec<PendingRestart>,
}

/// The source of the active config.
#[derive(Debug)]
enum Source {
    /// The config file, with its content.
    File(Vec<u8>),
    /// There is no file, or the file had errors at the very first start of gpushd. So no rule claims a GPU.
    Defaults,
    /// The copy of the last valid file.
    Copy,
    /// Neither the file nor the copy can be used. An earlier gpushd had rules that this gpushd does not know.
    Unknown,
}

impl Source {
    fn of(text: Option<Vec<u8>>) -> Self {
        text.map_or(Self::Defaults, Self::File)
    }
}

/// A file that gpushd has read but not activated yet.
#[derive(Debug)]
pub(crate) struct Candidate {
    /// The config to activate. Settings that need a restart have their old values.
    pub(crate) config: Config,
    /// The config as it is in the file.
    pub(crate) in_file: Config,
    text: Option<Vec<u8>>,
}

impl Candidate {
    /// Returns the users and groups that the file names, with their lines.
    pub(crate) fn accounts(&self) -> Vec<NamedAccount> {
        let text = self.text.as_deref().and_then(|bytes| std::str::from_utf8(bytes).ok());
        text.map_or_else(Vec::new, accounts_in)
    }
}

impl Settings {
    /// Reads the config when a user starts gpushd.
    ///
    /// # Errors
    /// If the file cannot be used.
    pub(crate) fn load(path: &Path, must_exist: bool, trust: Trust) -> Result<Self, ConfigLoadError> {
        let (config, text) = file::read(path, must_exist, trust)?;
        Ok(Self::new(path, must_exist, trust, None, (config, Source::of(text), None)))
    }

    /// Reads the config when systemd starts gpushd. If the file cannot be used, uses `copy`, the copy of the last valid
    /// file. `has_history` says whether a gpushd has run before.
    pub(crate) fn load_as_service(path: &Path, must_exist: bool, trust: Trust, copy: &Path, has_history: bool) -> Self {
        let copy = ConfigCopy::new(copy);
        let loaded = match file::read(path, must_exist, trust) {
            Ok((config, text)) => (config, Source::of(text), None),
            Err(error) => {
                let trouble = error.to_api();
                let (config, source, trouble) = match copy.read(trust) {
                    Ok(config) => (config, Source::Copy, trouble.outcome("gpushd uses the last valid config")),
                    Err(CopyError::Absent) if !has_history => {
                        (Config::default(), Source::Defaults, trouble.outcome("gpushd manages no GPU"))
                    }
                    Err(why) => {
                        let trouble = trouble.cause(why.to_string()).outcome(WITHOUT_RULES);
                        (Config::default(), Source::Unknown, trouble)
                    }
                };
                (config, source, Some(trouble))
            }
        };
        Self::new(path, must_exist, trust, Some(copy), loaded)
    }

    fn new(
        path: &Path,
        must_exist: bool,
        trust: Trust,
        copy: Option<ConfigCopy>,
        (config, source, trouble): (Config, Source, Option<ApiError>),
    ) -> Self {
        let state = CurrentSettings { config: Arc::new(config), source, trouble, pending: Vec::new() };
        Self(Arc::new(SettingsParts { path: path.to_owned(), must_exist, trust, copy, state: Locked::new(state) }))
    }

    /// Writes the copy of the active file. If the file had errors when gpushd started for the very first time, writes a
    /// copy without rules, because gpushd then managed no GPU.
    pub(crate) fn keep_copy(&self) {
        let Some(copy) = &self.0.copy else { return };
        let state = self.0.state.lock();
        let content = match &state.source {
            Source::File(content) => content.clone(),
            Source::Defaults => Vec::new(),
            Source::Copy | Source::Unknown => return,
        };
        drop(state);
        copy.write(&content);
    }

    /// Reads the file again, without applying it.
    ///
    /// # Errors
    /// If the file is invalid or unreadable.
    pub(crate) fn candidate(&self) -> Result<Candidate, ApiError> {
        let (in_file, text) =
            file::read(&self.0.path, self.0.must_exist, self.0.trust).map_err(|trouble| trouble.to_api())?;
        let in_force = self.config();
        let mut config = Config { driver: in_force.driver.clone(), ..in_file.clone() };
        config.api.admin_socket.clone_from(&in_force.api.admin_socket);
        Ok(Candidate { config, in_file, text })
    }

    /// Applies a candidate.
    pub(crate) fn activate(&self, candidate: Candidate) {
        let Candidate { config, in_file, text } = candidate;
        let pending = config.pending_restart(&in_file);
        let mut state = self.0.state.lock();
        *state = CurrentSettings { config: Arc::new(config), source: Source::of(text), trouble: None, pending };
        drop(state);
        self.keep_copy();
    }

    /// Stores why a reload was refused, so that health reports it. Returns the error.
    pub(crate) fn refuse(&self, mut error: ApiError) -> ApiError {
        let mut state = self.0.state.lock();
        error = error.outcome(match state.source {
            Source::File(_) | Source::Defaults | Source::Copy => "the previous config stays in effect",
            Source::Unknown => WITHOUT_RULES,
        });
        state.trouble = Some(error.clone());
        error
    }

    /// Returns the path of the config file. The file may not exist.
    pub(crate) fn path(&self) -> &Path {
        &self.0.path
    }

    /// Returns the active config.
    pub(crate) fn config(&self) -> Arc<Config> {
        Arc::clone(&self.0.state.lock().config)
    }

    /// Returns the path of the file; `None` if gpushd uses neither the file nor its copy.
    pub(crate) fn file(&self) -> Option<String> {
        let state = self.0.state.lock();
        match state.source {
            Source::File(_) | Source::Copy => Some(self.0.path.display().to_string()),
            Source::Defaults | Source::Unknown => None,
        }
    }

    /// Returns false if neither the config file nor its copy can be used, although an earlier gpushd had rules. The
    /// active config then has no rules.
    pub(crate) fn rules_are_known(&self) -> bool {
        let state = self.0.state.lock();
        !matches!(state.source, Source::Unknown)
    }

    /// Returns the changes in the file that need a restart.
    pub(crate) fn pending_restart(&self) -> Vec<PendingRestart> {
        self.0.state.lock().pending.clone()
    }

    /// Returns whether the file has changed since gpushd loaded it. This includes a file that gpushd could not load.
    pub(crate) fn is_file_changed(&self) -> bool {
        let loaded = match &self.0.state.lock().source {
            Source::File(content) => Some(content.clone()),
            Source::Defaults => None,
            Source::Copy | Source::Unknown => return true,
        };
        file::differs(&self.0.path, loaded.as_deref())
    }

    /// Returns the error of the last start or reload; `None` if the file was loaded.
    pub(crate) fn trouble(&self) -> Option<ApiError> {
        self.0.state.lock().trouble.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The config file and the copy of a service.
    struct Service {
        scratch: tempfile::TempDir,
        path: PathBuf,
    }

    impl Service {
        fn new() -> Self {
            let scratch = tempfile::tempdir().unwrap();
            Self { path: scratch.path().join("config.toml"), scratch }
        }

        fn copy(&self) -> PathBuf {
            self.scratch.path().join("copy.toml")
        }

        fn start(&self, has_history: bool) -> Settings {
            let settings = Settings::load_as_service(&self.path, false, Trust::Required, &self.copy(), has_history);
            settings.keep_copy();
            settings
        }

        fn write(&self, content: &str) {
            std::fs::write(&self.path, content).unwrap();
        }

        fn remove(&self) {
            let _ = std::fs::remove_file(&self.path);
            let _ = std::fs::remove_dir(&self.path);
        }
    }

    #[test]
    fn service_with_invalid_config_uses_the_last_valid_one() {
        let service = Service::new();
        service.write("auto_reconcile = 7\n");
        let first = service.start(false);
        assert_eq!(*first.config(), Config::default());
        let trouble = first.trouble().unwrap();
        assert!(trouble.causes[0].starts_with("line 1, column 18: "), "{trouble:?}");
        assert!(service.start(true).rules_are_known(), "the second start of the same host");

        service.write("auto_reconcile = true\n");
        service.start(true);
        service.write("auto_reconcile = 7\n");
        for _ in 0..2 {
            let settings = service.start(true);
            assert!(settings.config().auto_reconcile && settings.trouble().is_some());
        }
        // A successful reload also replaces the copy.
        let settings = service.start(true);
        service.write("auto_reconcile = false\n");
        settings.activate(settings.candidate().unwrap());
        assert_eq!(settings.trouble(), None);
        service.write("\u{0}");
        assert!(!service.start(true).config().auto_reconcile);
    }

    #[test]
    fn file_counts_as_changed_until_it_is_loaded() {
        let service = Service::new();
        let settings = service.start(false);
        assert!(!settings.is_file_changed(), "there is no file");
        service.write("auto_reconcile = true\n");
        assert!(settings.is_file_changed());
        settings.activate(settings.candidate().unwrap());
        assert!(!settings.is_file_changed());
        // The content counts, not the time of the file.
        service.write("auto_reconcile = true\n");
        assert!(!settings.is_file_changed());
        service.write("auto_reconcile = 7\n");
        assert!(settings.is_file_changed() && settings.candidate().is_err());
        service.remove();
        assert!(settings.is_file_changed());
    }

    #[test]
    fn service_starts_with_every_kind_of_unusable_config() {
        use std::os::unix::fs::{PermissionsExt, symlink};
        let service = Service::new();
        let path = &service.path;
        let mode = |mode| std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
        let kinds: [(&str, &dyn Fn()); 6] = [
            ("is not trusted", &|| mode(0o664 | 0o002)),
            ("can't be read", &|| std::fs::create_dir(path).unwrap()),
            ("can't be read", &|| nix::unistd::mkfifo(path, nix::sys::stat::Mode::S_IRUSR).unwrap()),
            ("can't be read", &|| symlink("config.toml", path).unwrap()),
            ("can't be read", &|| symlink("absent", path).unwrap()),
            ("has errors", &|| service.write("key_of_a_newer_version = 1\n")),
        ];
        for (at, (message, make)) in kinds.into_iter().enumerate() {
            service.remove();
            service.write("auto_reconcile = true\n");
            assert!(service.start(true).config().auto_reconcile);
            if at > 0 {
                service.remove();
            }
            make();
            let settings = service.start(true);
            let trouble = settings.trouble().unwrap();
            assert!(trouble.message.contains(message), "{at}: {trouble:?}");
            assert!(trouble.hint.is_some_and(|hint| hint.contains("`gpushctl config reload`")), "{at}");
            assert!(settings.config().auto_reconcile && settings.rules_are_known(), "{at}: the last valid config");
            assert!(Settings::load(path, false, Trust::Required).is_err(), "{at}: a user starts gpushd");
        }
    }

    #[test]
    fn service_without_file_and_copy_serves_without_knowing_the_rules() {
        let service = Service::new();
        let damages: [&dyn Fn(); 3] = [
            &|| std::fs::remove_file(service.copy()).unwrap(),
            &|| std::fs::write(service.copy(), "").unwrap(),
            &|| std::fs::write(service.copy(), "key_of_a_newer_version = 1\n").unwrap(),
        ];
        for damage in damages {
            service.write("auto_reconcile = true\n");
            assert!(service.start(true).rules_are_known());
            service.write("key_of_a_newer_version = 1\n");
            damage();
            let damaged = std::fs::read(service.copy()).ok();
            let settings = service.start(true);
            assert!(!settings.rules_are_known());
            assert_eq!(std::fs::read(service.copy()).ok(), damaged, "a restart must not take the copy for valid");
            let trouble = settings.trouble().unwrap();
            assert!(trouble.causes.iter().any(|cause| cause.contains("copy of the last valid config")), "{trouble:?}");
            assert_eq!(trouble.outcome.as_deref(), Some(WITHOUT_RULES));
            // A refused reload changes nothing. After a reload of a valid file, the rules are known.
            let refused = settings.refuse(settings.candidate().unwrap_err());
            assert_eq!(refused.outcome.as_deref(), Some(WITHOUT_RULES));
            assert!(!settings.rules_are_known());
            service.write("auto_reconcile = true\n");
            settings.activate(settings.candidate().unwrap());
            assert!(settings.rules_are_known() && settings.config().auto_reconcile);
            assert_eq!(settings.trouble(), None);
        }
    }

    #[test]
    fn invalid_config_changes_nothing_and_is_reported_until_fixed() {
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path().join("config.toml");
        std::fs::write(&path, "auto_reconcile = true\n").unwrap();
        let settings = Settings::load(&path, true, Trust::Logged).unwrap();
        assert!(settings.config().auto_reconcile);
        std::fs::write(&path, b"auto_reconcile = false\n\xff").unwrap();
        let error = settings.refuse(settings.candidate().unwrap_err());
        assert_eq!(error.code, gpush_api::Code::ConfigInvalid);
        assert!(settings.config().auto_reconcile);
        assert_eq!(settings.trouble(), Some(error));
        std::fs::write(&path, "auto_reconcile = false\n").unwrap();
        let candidate = settings.candidate().unwrap();
        assert!(settings.config().auto_reconcile, "read, and not in force yet");
        settings.activate(candidate);
        assert!(!settings.config().auto_reconcile);
        assert_eq!(settings.trouble(), None);
    }
}
