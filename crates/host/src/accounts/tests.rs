//! Accounts, with name services and files of ranges that the tests make.

use super::*;
use crate::users::Lookups;

/// Returns the accounts of a host with the users `alice` (1000) and 1001. The name service does not answer about
/// uid 1002, and about the owner `slow`.
fn accounts(text: &str) -> Accounts {
    let user = |uid: &u32| match uid {
        1000 => Some(Some("alice".to_owned())),
        1001 => Some(Some("bob".to_owned())),
        1002 => None,
        _ => Some(None),
    };
    let uid = |name: &String| match name.as_str() {
        "alice" => Some(Some(1000)),
        "root" => Some(Some(0)),
        "slow" => None,
        _ => Some(None),
    };
    let lookups = Lookups { user: Box::new(user), uid: Box::new(uid), ..Lookups::empty() };
    let accounts = Accounts::new(NameService::with(lookups).unwrap(), 990, Path::new("/nowhere"));
    accounts.lock().local = local_ranges(text);
    accounts
}

#[tokio::test]
async fn uid_counts_for_its_user_or_the_owner_of_its_range() {
    let accounts = accounts(
        "# comment\nalice:165536:65536\n1001:100000:65536\nroot:300000:10\ngone:400000:10\nbad\nslow:500000:10\n\
         1001:1000:1\nalice:600000:100\n1001:600010:10\n7:4294967295:5\n",
    );
    for (uid, account) in [
        // A user counts as this user, even if a range has the same uid.
        (1000, Ok(Account::User(1000))),
        (99_999, Ok(Account::Unknown)),
        (100_000, Ok(Account::User(1001))),
        (165_535, Ok(Account::User(1001))),
        (165_536, Ok(Account::User(1000))),
        (231_071, Ok(Account::User(1000))),
        (231_072, Ok(Account::Unknown)),
        (300_005, Ok(Account::RootContainers)),
        (400_009, Ok(Account::Unknown)),
        (500_000, Err(Unanswered)),
        (600_005, Ok(Account::User(1000))),
        (600_015, Ok(Account::User(1001))),
        (600_050, Ok(Account::User(1000))),
        (1002, Err(Unanswered)),
        (0, Ok(Account::User(0))),
        (990, Ok(Account::User(990))),
        (u32::MAX, Ok(Account::User(7))),
    ] {
        assert_eq!(accounts.of(uid).await, account, "{uid}");
        assert_eq!(accounts.last(uid), account, "{uid}, without waiting");
    }
}

#[tokio::test]
async fn user_owns_only_subordinate_uids() {
    let accounts =
        accounts("alice:165536:65536\n1001:100000:65536\nroot:300000:10\nslow:500000:10\nalice:1000:3\nalice:0:1\n");
    for (owner, uid, owns) in [
        (1000, 165_536, Ok(true)),
        (1001, 100_007, Ok(true)),
        (1001, 165_536, Ok(false)),
        // A user in a range, the range's owner, the user that gpushd runs as, and root are not subordinate.
        (1000, 1001, Ok(false)),
        (1000, 1000, Ok(false)),
        (1000, 990, Ok(false)),
        (1000, 0, Ok(false)),
        // The uid may be that of a user.
        (1000, 1002, Err(Unanswered)),
        (1000, 500_000, Err(Unanswered)),
        (0, 300_000, Ok(false)),
        (1000, 999_999, Ok(false)),
    ] {
        assert_eq!(accounts.owns(owner, uid).await, owns, "{owner} {uid}");
        assert_eq!(accounts.last_owns(owner, uid), owns, "{owner} {uid}, without waiting");
    }
}

/// Fault: nss-systemd names each of the uids that systemd-nsresourced lends to the user namespaces of a user. So each
/// uid counted as one more user, with limits of its own.
#[tokio::test]
async fn uids_of_user_namespaces_share_the_account_of_unknown_uids() {
    let user = |uid: &u32| Some((*uid >= 0x9_0000).then(|| format!("ns-box-{}", uid & 0xFFFF)));
    let lookups = Lookups { user: Box::new(user), ..Lookups::empty() };
    let accounts = Accounts::new(NameService::with(lookups).unwrap(), 990, Path::new("/nowhere"));
    assert_eq!(accounts.last(0x9_0001), Err(Unanswered));
    assert_eq!(accounts.of(0x9_0001).await, Ok(Account::Unknown));
    assert_eq!(accounts.last(0x9_0002), Ok(Account::Unknown), "before the name service has answered");
    assert_eq!(accounts.of(0xA_0002).await, Ok(Account::Unknown));
    assert!(accounts.owners_to_look_up().is_empty());
}

#[tokio::test]
async fn ranges_from_a_directory_count_for_their_owner() {
    assert!(has_other_source("passwd: files sss\nsubid:  sss\n") && has_other_source("subid: files sss"));
    assert!(!has_other_source("subid: files\n") && !has_other_source("passwd: files sss\n"));
    let accounts = accounts("");
    assert_eq!(accounts.of(700_001).await, Ok(Account::Unknown));
    assert_eq!(accounts.of(1000).await, Ok(Account::User(1000)));
    assert_eq!((accounts.owners_to_look_up(), accounts.owners_to_look_up()), (vec![1000], vec![]), "once an hour");
    let found = directory_ranges("0: alice 700000 65536\n1: alice bad\n", 1000);
    accounts.lock().set_directory(1000, found);
    assert_eq!(accounts.of(700_001).await, Ok(Account::User(1000)));
}

/// Fault: one user connected with very many subordinate uids. Their lookups filled the queue, and gpushd refused the
/// first connection of every other user. The answers about the uids left the cache, and then leases of these uids
/// counted for all users, and records for no limit.
#[tokio::test]
async fn lookups_of_subordinate_uids_block_no_other_user() {
    let (reported, answers) = std::sync::mpsc::channel::<()>();
    let answers = Locked::new(answers);
    let user = move |uid: &u32| {
        answers.lock().recv().ok()?;
        Some((*uid == 1000).then(|| "alice".to_owned()))
    };
    let lookups = Lookups { user: Box::new(user), ..Lookups::empty() };
    let accounts = Accounts::new(NameService::with(lookups).unwrap(), 990, Path::new("/nowhere"));
    accounts.lock().local = local_ranges("1001:100000:65536\n");
    let of_range = (100_000..100_200).map(|uid| accounts.last(uid)).collect::<Vec<_>>();
    assert_eq!(of_range, [Ok(Account::User(1001)); 200]);
    assert_eq!(accounts.of(100_300).await, Err(Unanswered), "the queue is full for subordinate uids");
    assert_eq!(accounts.last(1000), Err(Unanswered), "a uid in no range is unknown until the answer");
    (0..200).for_each(|_| reported.send(()).unwrap());
    assert_eq!(accounts.of(1000).await, Ok(Account::User(1000)));
    assert_eq!(accounts.of(100_300).await, Ok(Account::User(1001)));
}

/// Fault: the name of a user was in the cache because gpushd had shown it. Then the user connected, and gpushd did not
/// ask for the user's ranges.
#[tokio::test]
async fn user_with_cached_name_is_noted_as_owner() {
    let accounts = accounts("");
    assert_eq!(accounts.names.known_user(1000, UidKind::Other).await, Ok(Some("alice".to_owned())));
    assert_eq!(accounts.last(1000), Ok(Account::User(1000)));
    assert_eq!(accounts.owners_to_look_up(), [1000]);
}
