//! Field values: energy, power, memory temperature and limited time of a GPU in one driver call.

use nvml_wrapper_sys::bindings::{
    field_id, nvmlFieldValue_t, nvmlValueType_enum_NVML_VALUE_TYPE_DOUBLE as DOUBLE,
    nvmlValueType_enum_NVML_VALUE_TYPE_SIGNED_INT as SIGNED_INT,
    nvmlValueType_enum_NVML_VALUE_TYPE_SIGNED_LONG_LONG as SIGNED_LONG_LONG,
    nvmlValueType_enum_NVML_VALUE_TYPE_UNSIGNED_INT as UNSIGNED_INT,
    nvmlValueType_enum_NVML_VALUE_TYPE_UNSIGNED_LONG as UNSIGNED_LONG,
    nvmlValueType_enum_NVML_VALUE_TYPE_UNSIGNED_LONG_LONG as UNSIGNED_LONG_LONG,
    nvmlValueType_enum_NVML_VALUE_TYPE_UNSIGNED_SHORT as UNSIGNED_SHORT,
};

use crate::{
    driver::Gpu,
    error::{DriverError, ErrorKind},
};

/// The fields, in the order of [`Fields`].
const IDS: [u32; 7] = [
    field_id::NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION,
    field_id::NVML_FI_DEV_POWER_INSTANT,
    field_id::NVML_FI_DEV_POWER_AVERAGE,
    field_id::NVML_FI_DEV_POWER_CURRENT_LIMIT,
    field_id::NVML_FI_DEV_MEMORY_TEMP,
    field_id::NVML_FI_DEV_PERF_POLICY_POWER,
    field_id::NVML_FI_DEV_PERF_POLICY_THERMAL,
];

/// Largest plausible power in mW. Larger values are the driver's marks for "not available".
const MOST_MW: u64 = 10_000_000;
/// Largest plausible temperature in °C.
const MOST_C: u64 = 200;
/// Largest plausible counter: more than a thousand years of energy, or of nanoseconds.
const MOST_COUNT: u64 = 1 << 62;

/// The values of one call.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Fields {
    /// Time of the newest value, in µs since the epoch.
    pub(super) at_us: Option<u64>,
    pub(super) energy_mj: Option<u64>,
    pub(super) power_mw: Option<u32>,
    pub(super) power_limit_mw: Option<u32>,
    pub(super) memory_temperature_c: Option<u32>,
    pub(super) power_limited_ns: Option<u64>,
    pub(super) thermal_limited_ns: Option<u64>,
}

/// Returns the value of a field as an unsigned number.
fn unsigned(field: &nvmlFieldValue_t) -> Option<u64> {
    if field.nvmlReturn != 0 {
        return None;
    }
    let value = field.value;
    // SAFETY: each member is read only for its own type. The struct was zeroed before the call, so all bytes are
    // initialised.
    unsafe {
        match field.valueType {
            DOUBLE => (value.dVal >= 0.0 && value.dVal < 1e18).then_some(value.dVal as u64),
            UNSIGNED_INT => Some(value.uiVal.into()),
            UNSIGNED_LONG => Some(value.ulVal),
            UNSIGNED_LONG_LONG => Some(value.ullVal),
            SIGNED_LONG_LONG => u64::try_from(value.sllVal).ok(),
            SIGNED_INT => u64::try_from(value.siVal).ok(),
            UNSIGNED_SHORT => Some(value.usVal.into()),
            _ => None,
        }
    }
}

fn up_to(most: u64) -> impl Fn(&u64) -> bool {
    move |value| *value <= most
}

fn narrow(value: Option<u64>, most: u64) -> Option<u32> {
    value.filter(up_to(most)).and_then(|value| u32::try_from(value).ok())
}

impl Gpu<'_> {
    /// Reads the fields. Fields that the driver does not know are absent.
    ///
    /// # Errors
    /// Errors of the call as a whole. A driver without the call has no fields.
    pub(super) fn fields(&self) -> Result<Fields, DriverError> {
        // SAFETY: a struct of numbers, for which all zeroes are a valid value.
        let mut values: [nvmlFieldValue_t; IDS.len()] = unsafe { std::mem::zeroed() };
        values.iter_mut().zip(IDS).for_each(|(value, id)| value.fieldId = id);
        let count = IDS.len() as i32;
        // SAFETY: the array has `count` entries.
        match unsafe { nvml!(self.driver, nvmlDeviceGetFieldValues(self.device_handle(), count, values.as_mut_ptr())) }
        {
            Ok(()) => {}
            Err(error) if matches!(error.kind, ErrorKind::MissingSymbol | ErrorKind::NotSupported) => {
                return Ok(Fields::default());
            }
            Err(error) => return Err(error),
        }
        let read = values.each_ref().map(unsigned);
        let times = values.iter().filter(|value| value.nvmlReturn == 0).map(|value| value.timestamp);
        Ok(Fields {
            at_us: times.max().and_then(|time| u64::try_from(time).ok()).filter(|time| *time > 0),
            energy_mj: read[0].filter(up_to(MOST_COUNT)),
            power_mw: narrow(read[1], MOST_MW).or(narrow(read[2], MOST_MW)),
            power_limit_mw: narrow(read[3], MOST_MW),
            memory_temperature_c: narrow(read[4], MOST_C),
            power_limited_ns: read[5].filter(up_to(MOST_COUNT)),
            thermal_limited_ns: read[6].filter(up_to(MOST_COUNT)),
        })
    }
}

#[cfg(test)]
mod tests {
    use nvml_wrapper_sys::bindings::nvmlValue_t;

    use super::*;

    fn field(code: u32, kind: u32, value: u64) -> nvmlFieldValue_t {
        nvmlFieldValue_t {
            fieldId: 83,
            scopeId: 0,
            timestamp: 0,
            latencyUsec: 0,
            valueType: kind,
            nvmlReturn: code,
            value: nvmlValue_t { ullVal: value },
        }
    }

    #[test]
    fn field_values_are_read_by_their_type() {
        assert_eq!(unsigned(&field(0, UNSIGNED_INT, 7)), Some(7));
        assert_eq!(unsigned(&field(0, UNSIGNED_LONG_LONG, u64::MAX)), Some(u64::MAX));
        assert_eq!(unsigned(&field(0, SIGNED_INT, u64::from(u32::MAX))), None, "-1 is not a value");
        assert_eq!(unsigned(&field(0, DOUBLE, 2.5_f64.to_bits())), Some(2));
        assert_eq!(unsigned(&field(0, DOUBLE, f64::NAN.to_bits())), None);
        assert_eq!(unsigned(&field(3, UNSIGNED_INT, 7)), None, "the driver does not know the field");
        assert_eq!(unsigned(&field(0, 99, 7)), None);
    }

    #[test]
    fn marks_for_unavailable_values_are_left_out() {
        assert_eq!(narrow(Some(9_223_372_036_854_775_794), MOST_C), None);
        assert_eq!(narrow(Some(u64::from(u32::MAX)), MOST_MW), None);
        assert_eq!(narrow(Some(700_000), MOST_MW), Some(700_000));
        assert!(!up_to(MOST_COUNT)(&u64::MAX));
    }
}
