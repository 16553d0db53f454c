//! The check of passwords (HTTP basic authentication with bcrypt).
//!
//! bcrypt is slow on purpose, so clients without a password could keep the CPU busy:
//! - Only one check runs at a time, on a separate thread. Meanwhile, the relay serves other connections.
//! - Few checks may wait, and fewer for one address. The relay refuses further requests without a check.
//! - A successful check is remembered, so a scraper causes one check, not one for each scrape.

use std::{collections::VecDeque, net::IpAddr, sync::Arc};

use base64::{Engine as _, prelude::BASE64_STANDARD};
use gpush_core::web_config::WebConfig;
use gpush_locked::Locked;
use hyper::header::HeaderValue;
use ring::{hmac, rand::SystemRandom};
use tokio::sync::Semaphore;

use super::slots::Slots;

/// Maximum number of checks that run or wait, in total and for one address.
const MOST_CHECKS: (usize, usize) = (16, 4);

/// Maximum number of remembered checks.
const MOST_REMEMBERED: usize = 100;

/// The result of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    /// The user and the password are right.
    Accepted,
    /// The header is missing or invalid, or the user or the password is wrong.
    Refused,
    /// Too many checks wait.
    Busy,
}

/// Checks passwords, and remembers those that were right. A handle, cheap to clone.
#[derive(Debug, Clone)]
pub(super) struct Passwords(Arc<PasswordChecks>);

#[derive(Debug)]
struct PasswordChecks {
    /// Key of the tags. It is random, so that a tag does not help to guess a password.
    key: hmac::Key,
    /// Tags of users with their hashes and passwords that were right, oldest first.
    remembered: Locked<VecDeque<hmac::Tag>>,
    slots: Slots,
    lane: Semaphore,
}

impl Passwords {
    /// Creates the handle.
    ///
    /// # Errors
    /// The system has no random numbers.
    pub(super) fn new() -> Result<Self, ring::error::Unspecified> {
        Ok(Self(Arc::new(PasswordChecks {
            key: hmac::Key::generate(hmac::HMAC_SHA256, &SystemRandom::new())?,
            remembered: Locked::default(),
            slots: Slots::new(MOST_CHECKS.0, MOST_CHECKS.1),
            lane: Semaphore::new(1),
        })))
    }

    /// Checks the header `Authorization` of a request.
    pub(super) async fn check(&self, config: &WebConfig, header: Option<&HeaderValue>, address: IpAddr) -> Verdict {
        let Some((user, password)) = header.and_then(credentials) else { return Verdict::Refused };
        let is_user = config.users.contains_key(&user);
        // For an unknown user, check the hash of another user, so that the time of the answer does not show which users
        // exist.
        let hash = config.users.get(&user).or_else(|| config.users.values().next());
        let Some(hash) = hash.map(|hash| hash.text().to_owned()) else { return Verdict::Refused };
        let claim = claim(&user, &hash, &password);
        if is_user && self.0.remembers(&claim) {
            return Verdict::Accepted;
        }
        let Some(slot) = self.0.slots.take(address) else { return Verdict::Busy };
        let Ok(turn) = self.0.lane.acquire().await else { return Verdict::Busy };
        // Another request of the same scraper may have had its check meanwhile.
        if is_user && self.0.remembers(&claim) {
            return Verdict::Accepted;
        }
        let checked = tokio::task::spawn_blocking(move || bcrypt::verify(password, &hash).unwrap_or(false)).await;
        drop((turn, slot));
        if !(is_user && checked.unwrap_or(false)) {
            return Verdict::Refused;
        }
        self.0.remember(&claim);
        Verdict::Accepted
    }
}

impl PasswordChecks {
    fn remembers(&self, claim: &[u8]) -> bool {
        let remembered = self.remembered.lock();
        remembered.iter().any(|tag| hmac::verify(&self.key, claim, tag.as_ref()).is_ok())
    }

    fn remember(&self, claim: &[u8]) {
        let mut remembered = self.remembered.lock();
        if remembered.len() >= MOST_REMEMBERED {
            remembered.pop_front();
        }
        remembered.push_back(hmac::sign(&self.key, claim));
    }
}

/// Returns the user, the hash and the password as one text. The hash is a part of it, so that a changed password is checked
/// again. A user name has no colon, and a hash has a fixed length.
fn claim(user: &str, hash: &str, password: &[u8]) -> Vec<u8> {
    [user.as_bytes(), b":", hash.as_bytes(), password].concat()
}

/// Returns the user and the password of a header `Authorization: Basic …`.
fn credentials(header: &HeaderValue) -> Option<(String, Vec<u8>)> {
    let (scheme, value) = header.to_str().ok()?.split_once(' ')?;
    if !scheme.eq_ignore_ascii_case("basic") {
        return None;
    }
    let mut decoded = BASE64_STANDARD.decode(value.trim()).ok()?;
    let colon = decoded.iter().position(|byte| *byte == b':')?;
    let password = decoded.split_off(colon + 1);
    decoded.pop();
    Some((String::from_utf8(decoded).ok()?, password))
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    fn config(password: &str) -> WebConfig {
        let hash = bcrypt::hash(password, 4).unwrap();
        WebConfig::from_bytes(format!("basic_auth_users:\n  anna: {hash}\n").as_bytes(), "web.yml").unwrap()
    }

    fn header(user: &str, password: &str) -> HeaderValue {
        HeaderValue::try_from(format!("Basic {}", BASE64_STANDARD.encode(format!("{user}:{password}")))).unwrap()
    }

    async fn check(passwords: &Passwords, config: &WebConfig, header: Option<&HeaderValue>) -> Verdict {
        passwords.check(config, header, Ipv4Addr::LOCALHOST.into()).await
    }

    fn run<T>(future: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(future)
    }

    #[test]
    fn only_the_right_password_of_a_known_user_is_accepted() {
        run(async {
            let (passwords, config) = (Passwords::new().unwrap(), config("open: sesame"));
            for _ in 0..2 {
                assert_eq!(check(&passwords, &config, Some(&header("anna", "open: sesame"))).await, Verdict::Accepted);
            }
            for (user, password) in
                [("anna", "wrong"), ("anna", ""), ("bob", "open: sesame"), ("", ""), ("anna", "open")]
            {
                let verdict = check(&passwords, &config, Some(&header(user, password))).await;
                assert_eq!(verdict, Verdict::Refused, "{user}:{password}");
            }
            assert_eq!(check(&passwords, &config, None).await, Verdict::Refused);
            for bad in ["Basic", "Basic !!!", "Basic YW5uYQ==", "Bearer YW5uYTo="] {
                let header = HeaderValue::from_static(bad);
                assert_eq!(check(&passwords, &config, Some(&header)).await, Verdict::Refused, "{bad}");
            }
        });
    }

    /// A remembered password must not outlive its hash.
    #[test]
    fn changed_hash_ends_the_remembered_password() {
        run(async {
            let (passwords, before, after) = (Passwords::new().unwrap(), config("old"), config("new"));
            let old = header("anna", "old");
            assert_eq!(check(&passwords, &before, Some(&old)).await, Verdict::Accepted);
            assert_eq!(check(&passwords, &after, Some(&old)).await, Verdict::Refused);
            assert_eq!(check(&passwords, &WebConfig::default(), Some(&old)).await, Verdict::Refused);
        });
    }

    /// While wrong passwords wait for their check, a scraper with a remembered password is served, and so is another
    /// address.
    #[test]
    fn storm_of_wrong_passwords_delays_no_remembered_scraper() {
        run(async {
            let (passwords, config) = (Passwords::new().unwrap(), config("right"));
            let right = header("anna", "right");
            assert_eq!(check(&passwords, &config, Some(&right)).await, Verdict::Accepted);
            let lane = passwords.0.lane.acquire().await.unwrap();
            let wrong = header("anna", "wrong");
            let mut waiting: Vec<_> =
                (0..MOST_CHECKS.1).map(|_| Box::pin(check(&passwords, &config, Some(&wrong)))).collect();
            for one in &mut waiting {
                let polled = std::future::poll_fn(|context| std::task::Poll::Ready(one.as_mut().poll(context)));
                assert!(polled.await.is_pending());
            }
            assert_eq!(check(&passwords, &config, Some(&wrong)).await, Verdict::Busy);
            assert_eq!(check(&passwords, &config, Some(&right)).await, Verdict::Accepted);
            assert!(passwords.0.slots.take(Ipv4Addr::new(10, 0, 0, 1).into()).is_some(), "another address");
            drop(lane);
            for one in waiting {
                assert_eq!(one.await, Verdict::Refused);
            }
        });
    }
}
