//! Loads the config when gpushd starts, and checks who can have written the driver library.

use std::path::Path;

use gpush_api::ApiError;
use gpush_host::{
    helper::trust::{self, Untrusted},
    notify,
};

use crate::{
    options::{Paths, Trust},
    settings::{ConfigLoadError, Settings},
    state::words,
};

/// Reads the config. If the config cannot be used, a gpushd that a user started exits with the error. A gpushd that
/// systemd started continues, because users need their GPUs.
pub(super) fn load(paths: &Paths) -> Result<Settings, ConfigLoadError> {
    let Paths { config, config_named, trust, state_dir, .. } = paths;
    if !notify::is_service() {
        return Settings::load(config, *config_named, *trust);
    }
    let copy = state_dir.join("config.last-valid.toml");
    // The marker shows that there was a database, even if it was lost.
    let has_history = state_dir.join("gpush.db").exists() || paths.store_marker.exists();
    Ok(Settings::load_as_service(config, *config_named, *trust, &copy, has_history))
}

/// Maximum number of causes of an error in the log.
const MOST_LOGGED: usize = 20;

/// Logs an error of the config: one entry for the error with its hint, and one for each cause.
pub(super) fn log(error: &ApiError) {
    tracing::error!("{}", words::with_hint(error.to_string(), error));
    for cause in error.causes.iter().take(MOST_LOGGED) {
        tracing::error!("config: {cause}");
    }
    let more = error.causes.len().saturating_sub(MOST_LOGGED);
    if more > 0 {
        tracing::error!("config: {more} more errors; `gpushctl config check` lists all errors");
    }
}

/// Checks the driver library of the command line. If trust is required and the library is not trusted, returns an
/// error. [`Settings`] checks the config file, and the library that the file names. If trust is not required, this
/// function only logs a warning about a config file or library that the system service would not trust.
///
/// # Errors
/// If trust is required, and another user could have written the library.
pub(super) fn check_trust(paths: &Paths, named: Option<&Path>, library: Option<&Path>) -> anyhow::Result<()> {
    let own = nix::unistd::geteuid().as_raw();
    let distrust = |path: &Path| match trust::check_file(path, own) {
        // If the file is missing, the loader reports it, and health shows the error.
        Ok(()) | Err(Untrusted::Unreadable(_)) => None,
        Err(why) => Some(why),
    };
    // Check only a library that is named with a path. Without a path, the dynamic linker finds the library in
    // directories that only root can write.
    let has_path = |library: &&Path| library.components().count() > 1;
    match paths.trust {
        Trust::Required => {
            if let Some(library) = named.filter(has_path)
                && let Some(why) = distrust(library)
            {
                let library = library.display();
                anyhow::bail!("the driver library {library} is not trusted: {why}; {}", why.remedy());
            }
        }
        Trust::Logged => {
            let library = library.filter(has_path);
            for (what, path) in [("config file", Some(paths.config.as_path())), ("driver library", library)] {
                let Some((path, why)) = path.and_then(|path| Some((path.display(), distrust(path)?))) else { continue };
                tracing::warn!("a gpushd that runs as the system's service would not trust the {what} {path}: {why}");
            }
        }
    }
    Ok(())
}
