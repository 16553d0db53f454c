//! Carries the limits of a user's slice over to the slice of the user's leases. [`gpush_core::lease::user_limits`]
//! decides which limits.
//!
//! gpushd reads the limits before each new scope, so a changed limit applies from the next `gpushctl run` on, to all
//! scopes of the user.

use gpush_api::{ApiError, Code};
use gpush_core::lease::user_limits::{UserLimits, changes, not_carried};
use gpush_host::systemd::{self, Manager};

use super::{Leases, scope_unit::SLICE};

/// The pairs of slices: the slice of the user, and the slice of the leases. The limits for all users are in the parents
/// of both.
fn slices(uid: u32) -> [(String, String); 2] {
    [("user.slice".to_owned(), format!("{SLICE}.slice")), (format!("user-{uid}.slice"), format!("{SLICE}-{uid}.slice"))]
}

/// Checks that all limits of a user can be carried over, if the config requires this.
///
/// # Errors
/// If the config requires it, and a limit cannot be carried over, or the limits cannot be read.
pub(super) async fn check(leases: &Leases, manager: &Manager, uid: u32) -> Result<(), ApiError> {
    if leases.handles.context.state.config().leases.user_limits == UserLimits::Carry {
        return Ok(());
    }
    let [(users, _), (user, _)] = &slices(uid);
    let read = manager.limits([users, user]).await.map_err(|error| not_set(&error))?;
    for (of_user, read) in [users, user].into_iter().zip(&read) {
        let mut names = not_carried(&read.limits);
        if of_user == users && leases.handles.enforcement.is_installed() {
            // The scope of a lease has the same devices as `user.slice`, and those of the lease.
            names.retain(|name| !matches!(*name, "DevicePolicy" | "DeviceAllow"));
        }
        if !names.is_empty() {
            return Err(refusal(of_user, &names));
        }
    }
    Ok(())
}

/// Sets the limits of a user's slice on the slice of the user's leases.
///
/// # Errors
/// If the config requires the limits, and they cannot be read or set. Otherwise logs why.
pub(super) async fn carry_over(leases: &Leases, manager: &Manager, uid: u32) -> Result<(), ApiError> {
    let Err(error) = set(manager, uid).await else { return Ok(()) };
    match leases.handles.context.state.config().leases.user_limits {
        UserLimits::Require => Err(not_set(&error)),
        UserLimits::Carry => {
            tracing::warn!(
                uid,
                "cannot set the limits of user-{uid}.slice for the leases of uid {uid}: {}",
                error.in_full()
            );
            Ok(())
        }
    }
}

async fn set(manager: &Manager, uid: u32) -> Result<(), systemd::Error> {
    let pairs = slices(uid);
    let [(users, all), (of_user, of_leases)] = &pairs;
    let [limits_of_users, limits_of_all, limits_of_user, limits_of_leases] =
        manager.limits([users, all, of_user, of_leases]).await?;
    let read = [(limits_of_users, limits_of_all), (limits_of_user, limits_of_leases)];
    for ((of_user, of_leases), (user, own)) in pairs.iter().zip(read) {
        let changes = changes(&user.limits, &own.limits, &own.set_at_run_time);
        if changes.is_empty() {
            continue;
        }
        manager.set_limits(of_leases, &changes).await?;
        let names: Vec<&str> = changes.iter().map(|(name, _)| *name).collect();
        tracing::info!(uid, "set {} of {of_leases} as in {of_user}", names.join(", "));
    }
    Ok(())
}

fn not_set(error: &systemd::Error) -> ApiError {
    ApiError::new(Code::Unavailable, "cannot carry the limits of your slice over to the slice of your leases")
        .cause(error.in_full())
        .hint("see `systemctl status dbus.service`")
        .retryable()
}

fn refusal(slice: &str, names: &[&str]) -> ApiError {
    let message =
        "cannot grant a lease with a new scope: not all limits of your systemd slice would apply to the scope";
    ApiError::new(Code::Unsupported, message)
        .cause(format!("gpushd cannot carry over these properties of {slice}: {}", names.join(", ")))
        .cause("the config has user_limits = \"require\"".to_owned())
        .hint("add an end time to your request for a lease, such as `--for 2h`: `gpushctl lease request --help`")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusal_names_the_properties() {
        let [_, (of_user, of_leases)] = slices(1000);
        assert_eq!(of_leases, "gpulease-1000.slice");
        let error = refusal(&of_user, &["DevicePolicy"]);
        assert_eq!(error.code, Code::Unsupported);
        assert_eq!(error.causes[0], "gpushd cannot carry over these properties of user-1000.slice: DevicePolicy");
    }
}
