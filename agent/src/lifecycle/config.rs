//! Loads the config when gpushd starts, and checks who can have written the driver library.

use std::path::Path;

use gpush_api::ApiError;
use gpush_host::{
    helper::trust::{self, Untrusted},
    notify,
};

use crate::{
    state::words,
    system::{
        options::{Paths, Trust},
        settings::{ConfigLoadError, Settings},
    },
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

/// Logs an error of the config, one entry for each line.
pub(super) fn log(error: &ApiError) {
    lines(error).iter().for_each(|line| tracing::error!("{line}"));
}

/// Returns the lines about an error of the config: the error with its hint, then one line for each cause.
fn lines(error: &ApiError) -> Vec<String> {
    let causes = error.causes.iter().take(MOST_LOGGED).map(|cause| format!("config: {cause}"));
    let more = error.causes.len().saturating_sub(MOST_LOGGED);
    let not_logged = match more {
        0 => None,
        1 => Some("config: 1 more error; `gpushctl config check` lists all errors".to_owned()),
        more => Some(format!("config: {more} more errors; `gpushctl config check` lists all errors")),
    };
    [words::with_hint(error.to_string(), error)].into_iter().chain(causes).chain(not_logged).collect()
}

/// Checks the driver library of the command line. If trust is required and the library is not trusted, returns an
/// error. [`Settings`] checks the config file, and the library that the file names. If trust is not required, this
/// function only logs a warning about a config file or library that the system service would not trust.
///
/// # Errors
/// If trust is required, and another user can modify the file of the library.
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

#[cfg(test)]
mod tests {
    use gpush_core::config::Config;

    use super::*;

    /// Fault: an invalid config was one log line of 1,000 characters.
    #[test]
    fn each_error_of_the_config_gets_one_log_line() {
        let logged = |unknown_keys: usize| {
            let text: String = (0..unknown_keys).map(|at| format!("unknown_{at} = 1\n")).collect();
            lines(&ApiError::from(&Config::parse(&text, "gpush.toml").unwrap_err()))
        };
        let one = logged(1);
        assert_eq!(one.len(), 2, "{one:?}");
        assert!(one[0].contains("gpush.toml has an error; ") && one[0].contains("gpushctl config check gpush.toml"));
        let three = logged(3);
        assert_eq!(three.len(), 4, "{three:?}");
        assert!(three[0].contains("has 3 errors; "), "{three:?}");
        for (at, line) in three[1..].iter().enumerate() {
            let start = format!("config: gpush.toml:{}:1: ", at + 1);
            assert!(line.starts_with(&start) && line.contains(&format!("unknown_{at}")), "{line}");
            assert!(!line.contains('\n'), "{line}");
        }
        for (keys, last) in
            [(MOST_LOGGED, "config: gpush.toml:20"), (21, "config: 1 more error;"), (25, "config: 5 more errors;")]
        {
            let many = logged(keys);
            assert_eq!(many.len(), 1 + keys.min(MOST_LOGGED + 1), "{many:?}");
            assert!(many.last().is_some_and(|line| line.starts_with(last)), "{many:?}");
        }
    }
}
