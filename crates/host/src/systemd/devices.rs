//! Which devices the processes of a unit may open: `DevicePolicy=` and `DeviceAllow=`.
//!
//! systemd replaces the list of a running unit at once. systemd before version 250 removes the programs of all units for a
//! moment at each `daemon-reload`, so that their processes can open every device.

use std::collections::BTreeSet;

use gpush_core::lease::access::{AllowedDevice, denies_gpus, denies_minors};
use zbus::{
    export::ordered_stream::OrderedStreamExt,
    proxy::CacheProperties,
    zvariant::{Array, OwnedValue, Signature, Value},
};

use super::{
    Error, Manager, call, properties,
    proxies::{JobRemovedStream, Property, ReloadingStream, SystemManagerProxy},
};

/// First version of systemd that never opens devices while it reloads.
pub const FIRST_WITHOUT_GAPS: u32 = 250;

/// How long a property lasts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lasts {
    /// Until the unit ends, at most until the next boot.
    UntilBoot,
    /// Until it is changed again: systemd writes it to `/etc/systemd/system.control`.
    Forever,
}

/// The devices that a unit may open, as systemd shows them.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct UnitDevices {
    /// `auto`, `closed` or `strict`.
    pub policy: String,
    /// The patterns of the list.
    pub allowed: Vec<String>,
}

impl UnitDevices {
    /// Returns whether the processes of the unit may open no GPU.
    #[must_use]
    pub fn denies_gpus(&self) -> bool {
        denies_gpus(&self.policy, self.allowed.iter().map(String::as_str))
    }

    /// Returns whether the processes of the unit may open none of the GPUs with these minor numbers.
    #[must_use]
    pub fn denies_minors(&self, minors: &BTreeSet<u32>) -> bool {
        denies_minors(&self.policy, self.allowed.iter().map(String::as_str), minors)
    }
}

impl Manager {
    /// Returns the version of systemd; `None` if it is not a number.
    ///
    /// # Errors
    /// When the bus cannot be reached, or systemd refuses.
    pub async fn version(&self) -> Result<Option<u32>, Error> {
        let manager = self.manager().await?;
        Ok(version_number(&call("read the version of systemd", manager.version()).await?))
    }

    /// Limits the processes of a unit to these devices, instead of those of an earlier call.
    ///
    /// # Errors
    /// When systemd refuses, or the unit is not loaded.
    pub async fn set_devices(&self, unit: &str, lasts: Lasts, devices: &[AllowedDevice]) -> Result<(), Error> {
        self.set_device_properties(unit, lasts, &limits(devices)).await
    }

    /// Lets the processes of a unit open all devices again.
    ///
    /// systemd may keep the last list of a unit whose policy becomes `auto`. So the last list allows all devices.
    ///
    /// # Errors
    /// When systemd refuses, or the unit is not loaded.
    pub async fn open_devices(&self, unit: &str, lasts: Lasts) -> Result<(), Error> {
        let all = [("char-*".to_owned(), "rwm".to_owned()), ("block-*".to_owned(), "rwm".to_owned())];
        let open = [("DeviceAllow", no_devices()), ("DeviceAllow", Value::from(all.to_vec()))];
        self.set_device_properties(unit, lasts, &open).await?;
        let default = [("DeviceAllow", no_devices()), ("DevicePolicy", Value::from("auto"))];
        self.set_device_properties(unit, lasts, &default).await
    }

    async fn set_device_properties(&self, unit: &str, lasts: Lasts, properties: &[Property<'_>]) -> Result<(), Error> {
        let manager = self.manager().await?;
        let runtime = lasts == Lasts::UntilBoot;
        call(&format!("set the devices of {unit}"), manager.set_unit_properties(unit, runtime, properties)).await
    }

    /// Returns the devices that the processes of a unit may open.
    ///
    /// # Errors
    /// When systemd refuses, or the unit has no cgroup.
    pub async fn devices(&self, unit: &str) -> Result<UnitDevices, Error> {
        let manager = self.manager().await?;
        let properties = properties(&manager, unit).await?;
        let all = call(&format!("read the devices of {unit}"), properties.get_all("")).await?;
        let policy = all.get("DevicePolicy").and_then(|value| value.downcast_ref::<&str>().ok());
        let allowed = all.get("DeviceAllow").map(patterns).unwrap_or_default();
        Ok(UnitDevices { policy: policy.unwrap_or("auto").to_owned(), allowed })
    }

    /// Subscribes to two signals: systemd has loaded its units again; a job of a unit whose name ends with `suffix` has ended.
    ///
    /// # Errors
    /// When the bus cannot be reached.
    pub async fn unit_changes(&self, suffix: &'static str) -> Result<UnitChanges, Error> {
        let connection = self.subscribed("report its reloads").await?.manager.inner().connection().clone();
        let builder = SystemManagerProxy::builder(&connection).cache_properties(CacheProperties::No);
        let manager = builder.build().await.map_err(Error::Bus)?;
        let reloads = manager.receive_reloading().await.map_err(Error::Bus)?;
        let jobs = manager.receive_job_removed().await.map_err(Error::Bus)?;
        Ok(UnitChanges { reloads, jobs, suffix })
    }
}

/// A subscription to changes of systemd's units.
pub struct UnitChanges {
    reloads: ReloadingStream,
    jobs: JobRemovedStream,
    suffix: &'static str,
}

impl std::fmt::Debug for UnitChanges {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("UnitChanges").finish_non_exhaustive()
    }
}

impl UnitChanges {
    /// Waits for the end of the next reload, or of the next job of one of the units.
    ///
    /// # Errors
    /// When the connection ends.
    pub async fn next(&mut self) -> Result<(), Error> {
        loop {
            let is_change = tokio::select! {
                signal = OrderedStreamExt::next(&mut self.reloads) => {
                    signal.ok_or_else(super::closed)?.args().is_ok_and(|args| !args.active)
                }
                signal = OrderedStreamExt::next(&mut self.jobs) => {
                    signal.ok_or_else(super::closed)?.args().is_ok_and(|args| args.unit.ends_with(self.suffix))
                }
            };
            if is_change {
                return Ok(());
            }
        }
    }
}

/// Returns the properties that limit a unit to these devices.
pub(super) fn limits(devices: &[AllowedDevice]) -> [Property<'static>; 3] {
    let list: Vec<(String, String)> =
        devices.iter().map(|device| (device.pattern(), device.permissions().to_owned())).collect();
    // systemd adds the devices of a list to those of the present list, and an empty list removes them.
    [("DevicePolicy", Value::from("closed")), ("DeviceAllow", no_devices()), ("DeviceAllow", Value::from(list))]
}

fn no_devices() -> Value<'static> {
    Value::Array(Array::new(&Signature::structure([Signature::Str, Signature::Str])))
}

/// Returns the patterns of a list of devices.
fn patterns(list: &OwnedValue) -> Vec<String> {
    let pairs = <Vec<(String, String)>>::try_from(list.clone()).unwrap_or_default();
    pairs.into_iter().map(|(pattern, _)| pattern).collect()
}

/// Returns the number of a version of systemd, such as `257.13-1~deb13u1`.
pub(super) fn version_number(version: &str) -> Option<u32> {
    let number = version.trim_start_matches('v');
    let end = number.find(|letter: char| !letter.is_ascii_digit()).unwrap_or(number.len());
    number[..end].parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn properties_have_the_types_that_systemd_reads() {
        let [policy, empty, list] = limits(&[AllowedDevice::Node(195, 0), AllowedDevice::Major(1)]);
        assert_eq!((policy.0, policy.1), ("DevicePolicy", Value::from("closed")));
        for (name, value) in [&empty, &list] {
            assert_eq!((*name, value.value_signature().to_string()), ("DeviceAllow", "a(ss)".to_owned()));
        }
        let read = |value: &Value<'_>| patterns(&value.try_to_owned().unwrap());
        assert_eq!((read(&empty.1), read(&list.1)), (vec![], vec!["/dev/char/195:0".to_owned(), "char-1".to_owned()]));
    }

    #[test]
    fn version_is_the_number_before_the_suffix() {
        for (text, number) in
            [("257.13-1~deb13u1", Some(257)), ("v256-rc3", Some(256)), ("249", Some(249)), ("", None), ("deb257", None)]
        {
            assert_eq!(version_number(text), number, "{text}");
        }
    }
}
