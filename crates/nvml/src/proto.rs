//! The protocol between gpushd and its driver worker: typed frames over a socketpair.
//!
//! A frame is a length, as a little-endian `u32`, and that many bytes of JSON. gpushd, the parent, first sends
//! [`ToWorker::Init`]. The worker loads the library and answers with [`ToParent::Ready`]. After that, calls and replies
//! carry the call's number. Replies for one GPU arrive in order; replies for different GPUs arrive in any order.
//!
//! ```text
//! parent ── Init ──────────► worker        parent ◄── Ready(driver | why not) ── worker
//! parent ── Call{7, Read} ─► worker        parent ◄── Reply{7, …} ────────────── worker
//!                                          parent ◄── Event(Xid 79) ──────────── worker
//! ```

use std::{
    io::{self, Read, Write},
    path::PathBuf,
};

use gpush_api::{ComputeInstance, ComputeMode, Driver, GpuIndex, GpuInstance, GpuUuid, Placement};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::{
    error::DriverError,
    reading::{Event, Identity, Listed, ModeChange, Reading},
    sample::{InstanceRef, Sample, Wanted},
};

/// Largest frame in bytes. A reading of a GPU with all profiles is about 40 kB.
pub const MAX_FRAME: usize = 16 << 20;

/// A GPU as known to the parent. The UUID identifies the GPU. With the index and the PCI address,
/// the worker finds the GPU without a search. A search would access every GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuRef {
    /// `GPU-<uuid>`.
    pub uuid: GpuUuid,
    /// Index when last listed.
    pub index: Option<GpuIndex>,
    /// PCI address when last listed.
    pub pci: Option<String>,
}

impl GpuRef {
    /// Creates a reference from the UUID alone.
    pub fn new(uuid: &GpuUuid) -> Self {
        Self { uuid: uuid.clone(), index: None, pci: None }
    }
}

impl From<&Identity> for GpuRef {
    fn from(identity: &Identity) -> Self {
        Self { uuid: identity.uuid.clone(), index: Some(identity.index), pci: Some(identity.pci.clone()) }
    }
}

/// A driver call.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Request {
    /// List the GPUs, without accessing the GPUs in `skip`.
    List {
        /// GPUs with an unsettled call, with their last known index and PCI address.
        skip: Vec<GpuRef>,
    },
    /// Read one GPU.
    Read {
        /// The GPU.
        gpu: GpuRef,
    },
    /// Sample one GPU. Only the worker for samples gets this.
    Sample {
        /// The GPU.
        gpu: GpuRef,
        /// GPU instances; `None` if MIG is off.
        instances: Option<Vec<InstanceRef>>,
        /// What to read.
        wanted: Wanted,
    },
    /// Create a GPU instance.
    CreateGpuInstance {
        /// The GPU.
        gpu: GpuRef,
        /// Profile id, as the driver reports it.
        profile_id: u32,
        /// Placement in memory slices.
        placement: Placement,
    },
    /// Create a compute instance.
    CreateComputeInstance {
        /// The GPU.
        gpu: GpuRef,
        /// GPU instance id.
        gi: u32,
        /// Compute instance profile id.
        profile_id: u32,
        /// Placement in compute slots; `None` if the driver chooses the placement.
        placement: Option<Placement>,
    },
    /// Destroy a compute instance.
    DestroyComputeInstance {
        /// The GPU.
        gpu: GpuRef,
        /// GPU instance id.
        gi: u32,
        /// Compute instance id.
        ci: u32,
    },
    /// Destroy a GPU instance.
    DestroyGpuInstance {
        /// The GPU.
        gpu: GpuRef,
        /// GPU instance id.
        gi: u32,
    },
    /// Switch MIG mode.
    SetMigMode {
        /// The GPU.
        gpu: GpuRef,
        /// Requested mode.
        enabled: bool,
    },
    /// Set the compute mode.
    SetComputeMode {
        /// The GPU.
        gpu: GpuRef,
        /// Requested mode.
        mode: ComputeMode,
    },
}

impl Request {
    /// Returns the GPU of the call; `None` for a call about the host.
    #[must_use]
    pub fn gpu(&self) -> Option<&GpuRef> {
        match self {
            Self::List { .. } => None,
            Self::Read { gpu }
            | Self::Sample { gpu, .. }
            | Self::CreateGpuInstance { gpu, .. }
            | Self::CreateComputeInstance { gpu, .. }
            | Self::DestroyComputeInstance { gpu, .. }
            | Self::DestroyGpuInstance { gpu, .. }
            | Self::SetMigMode { gpu, .. }
            | Self::SetComputeMode { gpu, .. } => Some(gpu),
        }
    }

    /// Returns the GPU of the call, to update index and PCI address.
    pub fn gpu_mut(&mut self) -> Option<&mut GpuRef> {
        match self {
            Self::List { .. } => None,
            Self::Read { gpu }
            | Self::Sample { gpu, .. }
            | Self::CreateGpuInstance { gpu, .. }
            | Self::CreateComputeInstance { gpu, .. }
            | Self::DestroyComputeInstance { gpu, .. }
            | Self::DestroyGpuInstance { gpu, .. }
            | Self::SetMigMode { gpu, .. }
            | Self::SetComputeMode { gpu, .. } => Some(gpu),
        }
    }

    /// Returns whether the call changes the hardware.
    #[must_use]
    pub fn is_mutation(&self) -> bool {
        match self {
            Self::List { .. } | Self::Read { .. } | Self::Sample { .. } => false,
            Self::CreateGpuInstance { .. }
            | Self::CreateComputeInstance { .. }
            | Self::DestroyComputeInstance { .. }
            | Self::DestroyGpuInstance { .. }
            | Self::SetMigMode { .. }
            | Self::SetComputeMode { .. } => true,
        }
    }

    /// Returns the name of the call. Errors and logs use it for a failure outside NVML.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::List { .. } => "listing the GPUs",
            Self::Read { .. } => "reading the GPU",
            Self::Sample { .. } => "sampling the GPU",
            Self::CreateGpuInstance { .. } => "creating a GPU instance",
            Self::CreateComputeInstance { .. } => "creating a compute instance",
            Self::DestroyComputeInstance { .. } => "destroying a compute instance",
            Self::DestroyGpuInstance { .. } => "destroying a GPU instance",
            Self::SetMigMode { .. } => "setting MIG mode",
            Self::SetComputeMode { .. } => "setting the compute mode",
        }
    }

    /// Returns the kind of the call in metrics.
    pub(crate) fn kind(&self) -> &'static str {
        match self {
            Self::List { .. } => "list",
            Self::Read { .. } => "read",
            Self::Sample { .. } => "sample",
            Self::CreateGpuInstance { .. } => "create_gpu_instance",
            Self::CreateComputeInstance { .. } => "create_compute_instance",
            Self::DestroyComputeInstance { .. } => "destroy_compute_instance",
            Self::DestroyGpuInstance { .. } => "destroy_gpu_instance",
            Self::SetMigMode { .. } => "set_mig_mode",
            Self::SetComputeMode { .. } => "set_compute_mode",
        }
    }
}

/// The result of a call.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    /// Answer to [`Request::List`].
    Listed(Vec<Listed>),
    /// Answer to [`Request::Read`].
    Reading(Box<Reading>),
    /// Answer to [`Request::Sample`].
    Sample(Box<Sample>),
    /// Answer to [`Request::CreateGpuInstance`]: the instance, read back.
    GpuInstance(GpuInstance),
    /// Answer to [`Request::CreateComputeInstance`]: the instance, read back.
    ComputeInstance(ComputeInstance),
    /// Answer to a destroy call: the instance no longer exists.
    Destroyed,
    /// Answer to [`Request::SetMigMode`].
    Mode(ModeChange),
    /// Answer to [`Request::SetComputeMode`]: the mode is effective and was read back.
    ComputeModeSet,
}

/// Frames to the worker.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ToWorker {
    /// The first frame; sent only once.
    Init {
        /// Library to load; `None`: the loader searches for `libnvidia-ml.so.1`.
        library: Option<PathBuf>,
        /// Whether to listen to the driver's events.
        events: bool,
    },
    /// A call.
    Call {
        /// Number, unique during the parent's lifetime.
        id: u64,
        /// The call.
        request: Request,
    },
}

/// Frames to the parent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ToParent {
    /// Reports that the library is initialised, or why the initialisation failed. After a failure,
    /// the worker exits.
    Ready(Result<Driver, DriverError>),
    /// The reply to a call.
    Reply {
        /// Number of the call.
        id: u64,
        /// Result of the call.
        result: Result<Answer, DriverError>,
    },
    /// An event. It does not belong to a call.
    Event(Event),
}

/// Returns one frame as bytes.
///
/// # Errors
/// The frame is larger than [`MAX_FRAME`].
pub fn encode<T: Serialize>(frame: &T) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; 4];
    serde_json::to_writer(&mut bytes, frame)?;
    let length = bytes.len() - 4;
    if length > MAX_FRAME {
        return Err(io::Error::new(io::ErrorKind::InvalidData, format!("a frame of {length} bytes")));
    }
    let length = u32::try_from(length).map_err(io::Error::other)?;
    bytes[..4].copy_from_slice(&length.to_le_bytes());
    Ok(bytes)
}

/// Writes one frame.
///
/// # Errors
/// Errors of the stream.
pub fn write<T: Serialize>(stream: &mut impl Write, frame: &T) -> io::Result<()> {
    stream.write_all(&encode(frame)?)?;
    stream.flush()
}

/// Reads one frame. Returns `None` if the other side closed the stream between two frames.
///
/// # Errors
/// Errors of the stream; a truncated, oversized or invalid frame.
pub fn read<T: DeserializeOwned>(stream: &mut impl Read) -> io::Result<Option<T>> {
    let mut length = [0; 4];
    let mut have = 0;
    while have < length.len() {
        match stream.read(&mut length[have..]) {
            Ok(0) if have == 0 => return Ok(None),
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(n) => have += n,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    let length = u32::from_le_bytes(length) as usize;
    if length > MAX_FRAME {
        return Err(io::Error::new(io::ErrorKind::InvalidData, format!("a frame of {length} bytes")));
    }
    let mut body = vec![0; length];
    stream.read_exact(&mut body)?;
    Ok(Some(serde_json::from_slice(&body)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    fn frames() -> Vec<ToParent> {
        let error = DriverError::new(ErrorKind::GpuIsLost, "nvmlDeviceGetUUID").on("index 3");
        vec![
            ToParent::Ready(Err(DriverError::new(ErrorKind::DriverNotLoaded, "nvmlInit_v2"))),
            ToParent::Reply {
                id: 1,
                result: Ok(Answer::Listed(vec![Listed { index: GpuIndex(3), identity: Err(error.clone()) }])),
            },
            ToParent::Reply { id: u64::MAX, result: Err(error) },
            ToParent::Reply { id: 2, result: Ok(Answer::Destroyed) },
        ]
    }

    /// A reader that returns one byte at a time, and reports an interruption before each byte.
    struct Dribble<'a>(&'a [u8], bool);

    impl Read for Dribble<'_> {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            self.1 = !self.1;
            if self.1 {
                return Err(io::ErrorKind::Interrupted.into());
            }
            let n = buffer.len().min(self.0.len()).min(1);
            buffer[..n].copy_from_slice(&self.0[..n]);
            self.0 = &self.0[n..];
            Ok(n)
        }
    }

    #[test]
    fn frames_arrive_whole_in_any_pieces() {
        let mut bytes = Vec::new();
        for frame in frames() {
            write(&mut bytes, &frame).unwrap();
        }
        let mut stream = Dribble(&bytes, false);
        let mut arrived = Vec::new();
        while let Some(frame) = read::<ToParent>(&mut stream).unwrap() {
            arrived.push(frame);
        }
        assert_eq!(arrived, frames());
    }

    #[test]
    fn truncated_frame_is_an_error_and_closed_stream_is_not() {
        let bytes = encode(&frames()[0]).unwrap();
        assert!(read::<ToParent>(&mut &bytes[..0]).unwrap().is_none());
        for cut in 1..bytes.len() {
            assert!(read::<ToParent>(&mut &bytes[..cut]).is_err(), "{cut} of {}", bytes.len());
        }
    }

    #[test]
    fn excessive_frame_length_is_refused_before_allocation() {
        let error = read::<ToParent>(&mut &[0xff; 8][..]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    }

    #[test]
    fn mutations_are_recognised() {
        let gpu = || GpuRef::new(&"GPU-1".into());
        let at = Placement { start: 0, size: 1 };
        let requests = [
            (Request::List { skip: Vec::new() }, false),
            (Request::Read { gpu: gpu() }, false),
            (Request::Sample { gpu: gpu(), instances: None, wanted: Wanted::default() }, false),
            (Request::CreateGpuInstance { gpu: gpu(), profile_id: 0, placement: at }, true),
            (Request::CreateComputeInstance { gpu: gpu(), gi: 0, profile_id: 0, placement: None }, true),
            (Request::DestroyComputeInstance { gpu: gpu(), gi: 0, ci: 0 }, true),
            (Request::DestroyGpuInstance { gpu: gpu(), gi: 0 }, true),
            (Request::SetMigMode { gpu: gpu(), enabled: true }, true),
            (Request::SetComputeMode { gpu: gpu(), mode: ComputeMode::ExclusiveProcess }, true),
        ];
        for (mut request, mutation) in requests {
            assert_eq!(request.is_mutation(), mutation, "{}", request.name());
            assert_eq!(request.gpu_mut().is_some(), !matches!(request, Request::List { .. }));
        }
    }
}
