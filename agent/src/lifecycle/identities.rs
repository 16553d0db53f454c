//! Looks up the users and groups of the config ahead of time. So a request finds their ids in the cache, even if the name
//! service is slow when the request arrives.

use std::{sync::Arc, time::Duration};

use gpush_api::{ApiError, Code};
use gpush_core::{config::Config, lease::quota::Subject};
use gpush_host::identity::Users;
use tokio_util::sync::CancellationToken;

use crate::state::State;

/// Interval at which gpushd looks up the users and groups again.
const PERIOD: Duration = Duration::from_secs(60);

/// Returns an error if the name service does not answer.
pub(super) fn health(users: &Users) -> Vec<ApiError> {
    let unanswered = users.names().unanswered();
    if unanswered.is_empty() {
        return Vec::new();
    }
    let what = unanswered.join(", ");
    let error = ApiError::new(Code::Unavailable, "the name service of the host does not answer")
        .cause(format!("lookups without an answer: {what}"))
        .cause("gpushd refuses leases whose quota it cannot determine, and requests that only an admin group allows")
        .hint("check the services that `grep -E 'passwd|group' /etc/nsswitch.conf` shows");
    vec![error]
}

/// Looks up the users and groups of the config at once, after each change of the config, and periodically. Also updates
/// the ranges of subordinate uids. Ends when `stopping` is cancelled.
pub(super) async fn keep_resolved(state: State, users: Users, stopping: CancellationToken) {
    let mut snapshots = state.watch();
    let mut reported = Vec::new();
    while !stopping.is_cancelled() {
        let config = state.config();
        let (names, groups) = named(&config);
        let resolving = async {
            users.names().resolve(&names, &groups).await;
            let now = users.account_notes(None, &config.accounts()).await;
            for note in now.iter().filter(|note| !reported.contains(*note)) {
                tracing::warn!("the config names an account that gpushd cannot use: {note}");
            }
            reported = now;
            users.names().retry_failed();
            users.accounts().refresh().await;
        };
        let is_over = async {
            resolving.await;
            let changed = async { while Arc::ptr_eq(&state.config(), &config) && snapshots.changed().await.is_ok() {} };
            let _ = tokio::time::timeout(PERIOD, changed).await;
        };
        stopping.run_until_cancelled(is_over).await;
    }
}

/// Returns the users and the groups that the config names.
fn named(config: &Config) -> (Vec<String>, Vec<String>) {
    let (mut users, mut groups) = (Vec::new(), Vec::new());
    for account in config.accounts() {
        match account.subject {
            Subject::User(name) => users.push(name),
            Subject::Group(name) => groups.push(name),
            Subject::Everybody => {}
        }
    }
    (users, groups)
}

#[cfg(test)]
mod tests {
    use gpush_host::users::{Lookups, NameService};

    use super::*;

    #[tokio::test]
    async fn name_service_without_an_answer_degrades_health() {
        let group = |name: &String| (name != "down").then_some(None);
        let names = NameService::with(Lookups { group: Box::new(group), ..Lookups::empty() }).unwrap();
        let users = Users::new(names, 0, std::path::Path::new("/nowhere"));
        users.names().resolve(&[], &["ops".to_owned()]).await;
        assert_eq!(health(&users), []);
        users.names().resolve(&[], &["down".to_owned()]).await;
        let errors = health(&users);
        assert_eq!((errors.len(), errors[0].code), (1, Code::Unavailable));
        assert_eq!(errors[0].causes[0], "lookups without an answer: groups");
    }

    #[test]
    fn users_and_groups_of_the_config_are_resolved() {
        let text = "[access]\nadmin_groups = [\"ops\"]\n[[quota]]\nusers = [\"alice\"]\ngroups = [\"staff\"]\nleases = 1\n\
                    [[quota]]\neverybody = true\nleases = 2\n\
                    [[gpu]]\nmatch = [\"0\"]\nmode = \"exclusive\"\nusers = [\"anna\"]\ngroups = [\"ml\"]\n";
        let config = Config::parse(text, "config.toml").unwrap();
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        assert_eq!(named(&config), (names(&["alice", "anna"]), names(&["ops", "staff", "ml"])));
    }
}
