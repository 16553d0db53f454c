//! Counters for what runs at the same time, in total and for each address. So one address cannot take all slots. Addresses
//! of IPv6 count by their network (the first 64 bits), because one host can have all addresses of such a network.

use std::{
    collections::HashMap,
    net::{IpAddr, Ipv6Addr},
    sync::Arc,
};

use gpush_locked::Locked;

/// A limited number of slots.
#[derive(Debug, Clone)]
pub(super) struct Slots(Arc<SlotCounts>);

#[derive(Debug)]
struct SlotCounts {
    most: usize,
    most_of_address: usize,
    taken: Locked<HashMap<IpAddr, usize>>,
}

/// A slot, which is free again when this value is dropped.
#[derive(Debug)]
pub(super) struct TakenSlot {
    counts: Arc<SlotCounts>,
    address: IpAddr,
}

impl Slots {
    /// Creates `most` slots, of which one address can take `most_of_address`.
    pub(super) fn new(most: usize, most_of_address: usize) -> Self {
        Self(Arc::new(SlotCounts { most, most_of_address, taken: Locked::default() }))
    }

    /// Takes a slot, if one is free for this address.
    pub(super) fn take(&self, address: IpAddr) -> Option<TakenSlot> {
        let address = network(address);
        let mut taken = self.0.taken.lock();
        if taken.values().sum::<usize>() >= self.0.most {
            return None;
        }
        let of_address = taken.entry(address).or_default();
        if *of_address >= self.0.most_of_address {
            return None;
        }
        *of_address += 1;
        Some(TakenSlot { counts: Arc::clone(&self.0), address })
    }
}

/// Returns the address by which a peer counts.
fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() & !u128::from(u64::MAX)).into(),
        address @ IpAddr::V4(_) => address,
    }
}

impl Drop for TakenSlot {
    fn drop(&mut self) {
        let mut taken = self.counts.taken.lock();
        if let Some(of_address) = taken.get_mut(&self.address) {
            *of_address -= 1;
            if *of_address == 0 {
                taken.remove(&self.address);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_of_one_ipv6_network_count_together() {
        let of = |text: &str| network(text.parse().unwrap());
        assert_eq!(of("2001:db8:1:2::1"), of("2001:db8:1:2:ffff::9"));
        assert_ne!(of("2001:db8:1:2::1"), of("2001:db8:1:3::1"));
        assert_eq!(of("::ffff:10.0.0.1"), of("10.0.0.1"));
        assert_ne!(of("10.0.0.1"), of("10.0.0.2"));
    }

    #[test]
    fn one_address_cannot_take_all_slots() {
        let slots = Slots::new(3, 2);
        let address = |last| IpAddr::from([10, 0, 0, last]);
        let first = slots.take(address(1)).unwrap();
        let _second = slots.take(address(1)).unwrap();
        assert!(slots.take(address(1)).is_none(), "of this address");
        let third = slots.take(address(2)).unwrap();
        assert!(slots.take(address(3)).is_none(), "in total");
        drop(third);
        assert!(slots.take(address(3)).is_some());
        drop(first);
        assert!(slots.take(address(1)).is_some());
        assert_eq!(slots.0.taken.lock().len(), 1, "addresses without a slot are forgotten");
    }
}
