//! Reads and sets the limits of slices.
//!
//! systemd sets a property at run time with a file in `/run/systemd/system.control/UNIT.d`. So `DropInPaths` shows which
//! properties were set at run time, also after a restart of gpushd.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use gpush_core::lease::user_limits::{LimitChange, LimitValue, NOT_CARRIED, NUMBERS, SliceLimits, VALUES};
use zbus::zvariant::{Array, OwnedValue, Value};

use super::{Error, Manager, call, closed, properties, proxies::Property};

/// Where systemd keeps properties that were set at run time.
const RUN_TIME: &str = "/run/systemd/system.control/";

/// A value of a property that is not a number.
pub type UnitValue = OwnedValue;

/// The limits of a slice.
#[derive(Debug, Clone, PartialEq)]
pub struct ReadLimits {
    /// The properties that have a value.
    pub limits: SliceLimits<UnitValue>,
    /// The properties that were set at run time.
    pub set_at_run_time: BTreeSet<String>,
}

impl Manager {
    /// Reads the limits of slices at the same time, and returns them in this order. A slice without processes has the
    /// limits of its unit files.
    ///
    /// # Errors
    /// When the bus cannot be reached, or systemd refuses or does not answer in time.
    pub async fn limits<const N: usize>(&self, slices: [&str; N]) -> Result<[ReadLimits; N], Error> {
        match self.read_limits(slices).await {
            // The bus was restarted. A reading can be repeated.
            Err(Error::Bus(_)) => {
                self.disconnect().await;
                self.read_limits(slices).await
            }
            answer => answer,
        }
    }

    /// Reads the limits of slices on the present connection.
    async fn read_limits<const N: usize>(&self, slices: [&str; N]) -> Result<[ReadLimits; N], Error> {
        let manager = &self.subscribed("read the limits of slices").await?.manager;
        let reading = slices.map(|slice| async move {
            let properties = properties(manager, slice).await?;
            let what = format!("read the limits of {slice}");
            Ok(ReadLimits::of(&call(&what, properties.get_all("")).await?))
        });
        let read: Vec<ReadLimits> = futures_util::future::try_join_all(reading).await?;
        read.try_into().map_err(|_| closed())
    }

    /// Changes limits of a slice until the next boot.
    ///
    /// # Errors
    /// When systemd refuses, for example because this version does not know a property.
    pub async fn set_limits(&self, slice: &str, changes: &[(&str, LimitChange<UnitValue>)]) -> Result<(), Error> {
        let manager = self.manager().await?;
        let properties: Vec<Property<'_>> =
            changes.iter().flat_map(|(name, change)| assignments(name, change)).collect();
        call(&format!("set limits of {slice}"), manager.set_unit_properties(slice, true, &properties)).await
    }
}

impl ReadLimits {
    fn of(properties: &HashMap<String, OwnedValue>) -> Self {
        let names = NUMBERS.into_iter().chain(VALUES).chain(NOT_CARRIED);
        let value = |name: &str| Some((name.to_owned(), limit(properties.get(name)?)?));
        let files = properties.get("DropInPaths").and_then(|paths| <Vec<String>>::try_from(paths.clone()).ok());
        let set = files.unwrap_or_default().into_iter().filter_map(|path| property_of_file(&path));
        Self { limits: names.filter_map(value).collect::<BTreeMap<_, _>>(), set_at_run_time: set.collect() }
    }
}

/// Returns the property that a file sets at run time.
fn property_of_file(path: &str) -> Option<String> {
    let name = path.strip_prefix(RUN_TIME)?.rsplit('/').next()?.strip_prefix("50-")?.strip_suffix(".conf")?;
    // systemd names the file after the setting, which has another name than the property.
    Some(if name == "CPUQuota" { "CPUQuotaPerSecUSec" } else { name }.to_owned())
}

/// Returns the value of a property; `None` if it limits nothing.
fn limit(value: &OwnedValue) -> Option<LimitValue<UnitValue>> {
    if is_unlimited(value) {
        return None;
    }
    match **value {
        Value::U64(number) => Some(LimitValue::Number(number)),
        _ => Some(LimitValue::Other(value.clone())),
    }
}

fn is_unlimited(value: &Value<'_>) -> bool {
    match value {
        Value::U64(number) => *number == u64::MAX,
        // `auto` is the default of `DevicePolicy`.
        Value::Str(text) => matches!(text.as_str(), "" | "auto"),
        Value::Array(values) => values.is_empty(),
        // A list with a flag that says whether the list allows or denies.
        Value::Structure(fields) => {
            fields.fields().iter().all(|field| matches!(field, Value::Bool(_)) || is_unlimited(field))
        }
        _ => false,
    }
}

/// Returns the assignments for a change. systemd adds the values of a list to the present list, and an empty list
/// removes the present list.
fn assignments<'a>(name: &'a str, change: &'a LimitChange<UnitValue>) -> Vec<Property<'a>> {
    match change {
        LimitChange::Set(LimitValue::Number(number)) => vec![(name, Value::U64(*number))],
        LimitChange::Remove(LimitValue::Number(_)) => vec![(name, Value::U64(u64::MAX))],
        LimitChange::Set(LimitValue::Other(value)) => {
            let value: Value<'a> = (**value).try_clone().unwrap_or(Value::U8(0));
            emptied(&value).into_iter().chain([value]).map(|value| (name, value)).collect()
        }
        LimitChange::Remove(LimitValue::Other(value)) => {
            emptied(value).map(|value| (name, value)).into_iter().collect()
        }
    }
}

/// Returns an empty list of the same type; `None` if the value is not a list.
fn emptied<'a>(value: &Value<'_>) -> Option<Value<'a>> {
    match value {
        Value::Array(values) => Some(Value::Array(Array::new(values.element_signature()))),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owned<'a>(value: impl Into<Value<'a>>) -> OwnedValue {
        value.into().try_to_owned().unwrap()
    }

    #[test]
    fn properties_without_a_limit_are_left_out() {
        let properties = HashMap::from([
            ("MemoryMax".to_owned(), owned(Value::U64(u64::MAX))),
            ("MemoryHigh".to_owned(), owned(Value::U64(4096))),
            ("DevicePolicy".to_owned(), owned(Value::from("auto"))),
            ("IPIngressFilterPath".to_owned(), owned(Value::from(vec!["/sys/fs/bpf/a"]))),
            ("AllowedCPUs".to_owned(), owned(Value::from(Vec::<u8>::new()))),
            ("RestrictNetworkInterfaces".to_owned(), owned(Value::from((true, Vec::<String>::new())))),
            ("Description".to_owned(), owned(Value::from("a slice"))),
            (
                "DropInPaths".to_owned(),
                owned(Value::from(vec![
                    "/usr/lib/systemd/system/gpulease-.slice.d/10-defaults.conf",
                    "/run/systemd/system.control/gpulease-1.slice.d/50-CPUQuota.conf",
                    "/run/systemd/system.control/gpulease-1.slice.d/50-MemoryHigh.conf",
                    "/etc/systemd/system/gpulease-1.slice.d/50-MemoryMax.conf",
                ])),
            ),
        ]);
        let read = ReadLimits::of(&properties);
        assert_eq!(read.limits.keys().collect::<Vec<_>>(), ["IPIngressFilterPath", "MemoryHigh"]);
        assert_eq!(read.limits["MemoryHigh"], LimitValue::Number(4096));
        assert_eq!(read.set_at_run_time, BTreeSet::from(["CPUQuotaPerSecUSec", "MemoryHigh"].map(str::to_owned)));
    }

    #[test]
    fn list_is_emptied_before_it_is_set() {
        let list = owned(Value::from(vec![("/dev/vda", 7_u64)]));
        let set = LimitChange::Set(LimitValue::Other(list.clone()));
        let [(_, empty), (_, full)] = &assignments("IOReadBandwidthMax", &set)[..] else { panic!("two assignments") };
        assert_eq!((empty.value_signature().to_string(), full), ("a(st)".to_owned(), &*list));
        let removed = LimitChange::Remove(LimitValue::Other(list.clone()));
        assert_eq!(assignments("IOReadBandwidthMax", &removed), [("IOReadBandwidthMax", empty.clone())]);
        let number = LimitChange::Remove(LimitValue::Number(5));
        assert_eq!(assignments("TasksMax", &number), [("TasksMax", Value::U64(u64::MAX))]);
    }
}
