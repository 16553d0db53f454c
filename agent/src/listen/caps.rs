//! How many connections one uid, and all together, may have open.
//!
//! A caller that opens connections without end must neither use up our file descriptors nor keep
//! others out. Root and the agent's own uid have a share that nobody else can take. The second
//! socket counts its connections apart: what is open on the first costs it none.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

/// Connections of one uid that is not privileged.
const PER_UID: usize = 32;

/// Connections kept for root and the agent's own uid.
const RESERVED: usize = 64;

/// Connections in all, when the limit of file descriptors allows.
const IN_ALL: usize = 512;

/// Connections to the second socket in all.
const ADMIN: usize = 128;

/// The count of open connections.
#[derive(Debug, Clone)]
pub(crate) struct Caps {
    open: Arc<Mutex<HashMap<u32, usize>>>,
    in_all: usize,
    own: u32,
}

/// A place for one connection, given back when dropped.
#[derive(Debug)]
pub(crate) struct Place {
    caps: Caps,
    uid: u32,
}

impl Caps {
    /// Caps of the first socket, in a process that may open `descriptors` files: three eighths of
    /// them are left for the second socket and the rest.
    pub(crate) fn public(descriptors: u64, own: u32) -> Self {
        Self::new((eighths(descriptors, 5)).clamp(RESERVED / 2, IN_ALL), own)
    }

    /// Caps of the second one.
    pub(crate) fn admin(descriptors: u64, own: u32) -> Self {
        Self::new(eighths(descriptors, 1).clamp(8, ADMIN), own)
    }

    fn new(in_all: usize, own: u32) -> Self {
        Self { open: Arc::default(), in_all, own }
    }

    /// A place for a connection of `uid`, or why there is none.
    pub(crate) fn enter(&self, uid: u32) -> Result<Place, String> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let all: usize = open.values().sum();
        let mine = open.get(&uid).copied().unwrap_or(0);
        let privileged = uid == 0 || uid == self.own;
        let most = if privileged { self.in_all } else { self.in_all.saturating_sub(RESERVED.min(self.in_all / 2)) };
        if all >= most {
            return Err(format!("gpushd has {all} connections open and takes no more for now"));
        }
        if !privileged && mine >= PER_UID {
            return Err(format!("uid {uid} has {mine} connections open and may not have more"));
        }
        *open.entry(uid).or_default() += 1;
        Ok(Place { caps: self.clone(), uid })
    }
}

fn eighths(descriptors: u64, count: u64) -> usize {
    usize::try_from(descriptors / 8 * count).unwrap_or(usize::MAX)
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut open = self.caps.open.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = open.get_mut(&self.uid) {
            *count -= 1;
            if *count == 0 {
                open.remove(&self.uid);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_uid_can_neither_pass_its_share_nor_keep_others_out() {
        let caps = Caps::public(1 << 20, 990);
        let mine: Vec<_> = (0..PER_UID).map(|_| caps.enter(1000).unwrap()).collect();
        assert!(caps.enter(1000).unwrap_err().contains("uid 1000 has 32 connections"));
        let other = caps.enter(1001).unwrap();
        drop(mine);
        drop(other);
        assert!(caps.open.lock().unwrap().is_empty());
    }

    #[test]
    fn all_users_together_leave_room_for_root_and_us() {
        let caps = Caps::public(1 << 20, 990);
        let mut places = Vec::new();
        let mut uid = 1000;
        let refused = loop {
            match caps.enter(uid) {
                Ok(place) => places.push(place),
                Err(why) if why.contains("takes no more") => break why,
                Err(_) => uid += 1,
            }
        };
        assert_eq!(places.len(), IN_ALL - RESERVED, "{refused}");
        for n in 0..RESERVED {
            places.push(caps.enter(if n % 2 == 0 { 0 } else { 990 }).unwrap());
        }
        assert!(caps.enter(0).is_err());
    }

    #[test]
    fn a_low_limit_of_descriptors_is_heeded() {
        let most = |caps: Caps| {
            let places: Vec<_> = std::iter::from_fn(|| caps.enter(0).ok()).collect();
            places.len()
        };
        assert_eq!((most(Caps::public(100, 990)), most(Caps::admin(100, 990))), (60, 12));
        assert_eq!((most(Caps::public(1 << 20, 990)), most(Caps::admin(1 << 20, 990))), (IN_ALL, ADMIN));
    }
}
