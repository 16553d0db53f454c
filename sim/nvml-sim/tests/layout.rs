//! Compares the sizes of the C structs, and their version words, with the header of driver 550.
//!
//! The library uses the bindings of a newer header. If a struct were larger in that header, the
//! library would write beyond the end of a client's struct.

use std::mem::{offset_of, size_of};

use nvml_wrapper_sys::bindings::*;

#[test]
fn structs_have_the_sizes_of_the_550_header() {
    let sizes = [
        ("ProcessInfo_v1", size_of::<nvmlProcessInfo_v1_t>(), 16),
        ("ProcessInfo_v2", size_of::<nvmlProcessInfo_v2_t>(), 24),
        ("PciInfo", size_of::<nvmlPciInfo_t>(), 68),
        ("PciInfoExt_v1", size_of::<nvmlPciInfoExt_v1_t>(), 64),
        ("DeviceAttributes", size_of::<nvmlDeviceAttributes_t>(), 40),
        ("EventData", size_of::<nvmlEventData_t>(), 32),
        ("FieldValue", size_of::<nvmlFieldValue_t>(), 40),
        ("GpuInstanceProfileInfo", size_of::<nvmlGpuInstanceProfileInfo_t>(), 48),
        ("GpuInstanceProfileInfo_v2", size_of::<nvmlGpuInstanceProfileInfo_v2_t>(), 152),
        ("GpuInstanceProfileInfo_v3", size_of::<nvmlGpuInstanceProfileInfo_v3_t>(), 152),
        ("GpuInstancePlacement", size_of::<nvmlGpuInstancePlacement_t>(), 8),
        ("GpuInstanceInfo", size_of::<nvmlGpuInstanceInfo_t>(), 24),
        ("ComputeInstanceProfileInfo", size_of::<nvmlComputeInstanceProfileInfo_t>(), 36),
        ("ComputeInstanceProfileInfo_v2", size_of::<nvmlComputeInstanceProfileInfo_v2_t>(), 136),
        ("ComputeInstanceProfileInfo_v3", size_of::<nvmlComputeInstanceProfileInfo_v3_t>(), 140),
        ("ComputeInstancePlacement", size_of::<nvmlComputeInstancePlacement_t>(), 8),
        ("ComputeInstanceInfo", size_of::<nvmlComputeInstanceInfo_t>(), 32),
        ("ProcessUtilizationSample", size_of::<nvmlProcessUtilizationSample_t>(), 32),
        ("AccountingStats", size_of::<nvmlAccountingStats_t>(), 56),
        ("Memory", size_of::<nvmlMemory_t>(), 24),
        ("Memory_v2", size_of::<nvmlMemory_v2_t>(), 40),
        ("BAR1Memory", size_of::<nvmlBAR1Memory_t>(), 24),
        ("Utilization", size_of::<nvmlUtilization_t>(), 8),
        ("GpmMetric", size_of::<nvmlGpmMetric_t>(), 40),
        ("GpmSupport", size_of::<nvmlGpmSupport_t>(), 8),
    ];
    println!("{} structs", sizes.len());
    for (name, size, wanted) in sizes {
        assert_eq!(size, wanted, "{name}");
    }
    // The array of metrics is the last field, because its length differs between headers.
    assert_eq!(offset_of!(nvmlGpmMetricsGet_t, metrics), 24);
    assert_eq!(offset_of!(nvmlGpuInstanceProfileInfo_v2_t, name), 56);
    assert_eq!(offset_of!(nvmlComputeInstanceInfo_t, placement), 24);
    assert_eq!(offset_of!(nvmlProcessInfo_v2_t, gpuInstanceId), 16);
    assert_eq!(offset_of!(nvmlEventData_t, gpuInstanceId), 24);
}

#[test]
fn version_words_are_size_and_version() {
    let word = |size: usize, version: u32| u32::try_from(size).unwrap() | version << 24;
    assert_eq!(word(size_of::<nvmlMemory_v2_t>(), 2), 0x0200_0028);
    assert_eq!(word(size_of::<nvmlPciInfoExt_v1_t>(), 1), 0x0100_0040);
    assert_eq!(word(size_of::<nvmlGpuInstanceProfileInfo_v2_t>(), 2), 0x0200_0098);
    assert_eq!(word(size_of::<nvmlGpuInstanceProfileInfo_v3_t>(), 3), 0x0300_0098);
    assert_eq!(word(size_of::<nvmlComputeInstanceProfileInfo_v2_t>(), 2), 0x0200_0088);
    assert_eq!(word(size_of::<nvmlComputeInstanceProfileInfo_v3_t>(), 3), 0x0300_008c);
}
