//! Limits of a user's slice for the slice of the user's leases.
//!
//! `gpushctl run` moves a process from `user-UID.slice` into a scope below `gpulease-UID.slice`. The limits of the first
//! slice do not apply there, so gpushd sets them on the second slice:
//!
//! ```text
//! user.slice      ─ user-UID.slice       limits ─┐ read before each new scope
//! gpulease.slice  ─ gpulease-UID.slice  ◄────────┘ numbers: the stricter of both; other values: where there is none
//! ```
//!
//! Both slices have the limit, so a user can use it twice: once in each slice.
//!
//! Some properties cannot be carried over. `DevicePolicy=` and `DeviceAllow=` are not carried over on purpose: an
//! administrator denies the devices in `user.slice`, so that only leases give access to GPUs. The programs that filter
//! packets and system resources belong to the service manager, which does not pass them on.

use std::collections::{BTreeMap, BTreeSet};

/// Limits that are numbers. A smaller number is stricter.
pub const NUMBERS: [&str; 6] =
    ["MemoryMax", "MemoryHigh", "MemorySwapMax", "MemoryZSwapMax", "CPUQuotaPerSecUSec", "TasksMax"];

/// Other properties that are carried over: shares, sets of processors, limits of disks, and filters of addresses.
pub const VALUES: [&str; 12] = [
    "CPUWeight",
    "CPUQuotaPeriodUSec",
    "IOWeight",
    "AllowedCPUs",
    "AllowedMemoryNodes",
    "IODeviceWeight",
    "IOReadBandwidthMax",
    "IOWriteBandwidthMax",
    "IOReadIOPSMax",
    "IOWriteIOPSMax",
    "IPAddressAllow",
    "IPAddressDeny",
];

/// Properties that are not carried over.
pub const NOT_CARRIED: [&str; 9] = [
    "DevicePolicy",
    "DeviceAllow",
    "IPIngressFilterPath",
    "IPEgressFilterPath",
    "BPFProgram",
    "RestrictNetworkInterfaces",
    "SocketBindAllow",
    "SocketBindDeny",
    "DisableControllers",
];

/// What gpushd does if a limit of a user's slice cannot be carried over: `leases.user_limits` in the config.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum UserLimits {
    /// Carries over what it can.
    #[default]
    Carry,
    /// Refuses leases that need a scope.
    Require,
}

/// The value of a property.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LimitValue<V> {
    /// A number.
    Number(u64),
    /// Another value, which is compared only for equality.
    Other(V),
}

/// The properties of a slice that have a value. A property without a limit is missing.
pub type SliceLimits<V> = BTreeMap<String, LimitValue<V>>;

/// A change of a property of the slice of a user's leases.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LimitChange<V> {
    /// Sets the value.
    Set(LimitValue<V>),
    /// Removes the limit, because the user's slice no longer has it. Contains the present value.
    Remove(LimitValue<V>),
}

/// Returns the properties of a user's slice that are not carried over.
#[must_use]
pub fn not_carried<V>(user: &SliceLimits<V>) -> Vec<&'static str> {
    NOT_CARRIED.into_iter().filter(|name| user.contains_key(*name)).collect()
}

/// Returns how the properties of the slice of a user's leases must change. `set_before` has the properties that an
/// earlier call of gpushd, or an administrator, has set at run time. All other values of `leases` are from unit files.
#[must_use]
pub fn changes<V: Clone + PartialEq>(
    user: &SliceLimits<V>,
    leases: &SliceLimits<V>,
    set_before: &BTreeSet<String>,
) -> Vec<(&'static str, LimitChange<V>)> {
    let change = |name: &'static str| {
        let (wanted, present) = (user.get(name), leases.get(name));
        let is_from_unit_file = present.is_some() && !set_before.contains(name);
        let change = match (wanted, present) {
            (Some(wanted), Some(present)) if wanted == present => return None,
            // A unit file of the slice of the leases may be stricter.
            (Some(LimitValue::Number(wanted)), Some(LimitValue::Number(present)))
                if is_from_unit_file && (!NUMBERS.contains(&name) || wanted >= present) =>
            {
                return None;
            }
            (Some(LimitValue::Other(_)), Some(_)) if is_from_unit_file => return None,
            (Some(wanted), _) => LimitChange::Set(wanted.clone()),
            (None, Some(present)) if !is_from_unit_file => LimitChange::Remove(present.clone()),
            (None, _) => return None,
        };
        Some((name, change))
    };
    NUMBERS.into_iter().chain(VALUES).filter_map(change).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits(all: &[(&str, LimitValue<&'static str>)]) -> SliceLimits<&'static str> {
        all.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect()
    }

    #[test]
    fn stricter_number_of_both_slices_applies() {
        use LimitValue::Number;
        let user = limits(&[("MemoryMax", Number(4)), ("TasksMax", Number(100)), ("MemoryHigh", Number(3))]);
        let leases = limits(&[("MemoryMax", Number(8)), ("TasksMax", Number(33))]);
        let found = changes(&user, &leases, &BTreeSet::new());
        let expected = [("MemoryMax", LimitChange::Set(Number(4))), ("MemoryHigh", LimitChange::Set(Number(3)))];
        assert_eq!(found, expected);
        // Once gpushd has set a limit, the limit follows the user's slice.
        let set = BTreeSet::from(["MemoryMax".to_owned()]);
        let leases = limits(&[("MemoryMax", Number(2)), ("TasksMax", Number(33)), ("MemoryHigh", Number(3))]);
        assert_eq!(changes(&user, &leases, &set), [("MemoryMax", LimitChange::Set(Number(4)))]);
        let none = limits(&[]);
        assert_eq!(changes(&none, &leases, &set), [("MemoryMax", LimitChange::Remove(Number(2)))]);
    }

    #[test]
    fn weight_in_a_unit_file_is_not_replaced() {
        use LimitValue::{Number, Other};
        let user = limits(&[("CPUWeight", Number(50)), ("AllowedCPUs", Other("0-3")), ("IOWeight", Number(20))]);
        let own = limits(&[("CPUWeight", Number(200)), ("AllowedCPUs", Other("0"))]);
        assert_eq!(changes(&user, &own, &BTreeSet::new()), [("IOWeight", LimitChange::Set(Number(20)))]);
        let set = BTreeSet::from(["CPUWeight".to_owned(), "AllowedCPUs".to_owned()]);
        assert_eq!(changes(&user, &own, &set).len(), 3);
        assert_eq!(changes(&user, &user, &set), []);
    }

    /// A `user.slice` that denies the devices must not deny them to leases.
    #[test]
    fn device_policy_is_named_and_never_carried_over() {
        use LimitValue::Other;
        let user = limits(&[("DevicePolicy", Other("closed")), ("IPIngressFilterPath", Other("/a"))]);
        assert_eq!(not_carried(&user), ["DevicePolicy", "IPIngressFilterPath"]);
        assert_eq!(changes(&user, &limits(&[]), &BTreeSet::new()), []);
    }
}
