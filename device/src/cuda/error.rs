use std::{fmt, time::Duration};

use super::version::Version;

/// Why CUDA cannot be used, or a call failed. Messages say what to do.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CudaError {
    /// No driver library could be loaded.
    #[error(
        "The CUDA driver's library libcuda.so.1 could not be loaded: {reason}. Install NVIDIA's driver; in a container, \
         start it with access to GPUs (docker run --gpus all)."
    )]
    NoLibrary {
        /// The loader's message.
        reason: String,
    },
    /// The loaded library is not a driver, or an old or incomplete one.
    #[error(
        "The CUDA driver's library has no function {symbol}. It is older than CUDA {}, incomplete, or not a driver: \
         look for another libcuda.so in LD_LIBRARY_PATH.",
        Version::OLDEST
    )]
    NoSymbol {
        /// The missing function.
        symbol: &'static str,
    },
    /// The driver is too old.
    #[error(
        "The CUDA driver supports CUDA {found}, but {} is needed. Update NVIDIA's driver.",
        Version::OLDEST
    )]
    DriverTooOld {
        /// The driver's version.
        found: Version,
    },
    /// The library is the toolkit's stub, which is for linkers.
    #[error(
        "The loaded CUDA library is the toolkit's stub, not a driver. Remove the toolkit's folder `stubs` from \
         LD_LIBRARY_PATH."
    )]
    Stub,
    /// There is a driver, but no device.
    #[error(
        "There is a CUDA driver, but no device that this process may use. Look at nvidia-smi and at \
         CUDA_VISIBLE_DEVICES; in a container, start it with access to GPUs (docker run --gpus all)."
    )]
    NoDevice,
    /// The requested device does not exist.
    #[error("There is no device cuda:{ordinal}. This process sees {}.", Devices(*devices))]
    NoSuchDevice {
        /// The requested ordinal.
        ordinal: usize,
        /// The number of devices.
        devices: usize,
    },
    /// The driver refused a call.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// The thread of an engine or a query could not be started.
    #[error("The system could not start a thread for {device}: {reason}.")]
    NoThread {
        /// The device, or the queried component.
        device: String,
        /// The system's message.
        reason: String,
    },
    /// The thread of an engine or a query did not answer in time: a driver call blocks it. The thread handles the
    /// request later, and keeps a stream in the request until then.
    #[error(
        "The thread for {device} did not answer within {waited:?}: a driver call blocks it. The device hangs, or \
         another program keeps it busy; look at nvidia-smi and at the kernel's log for Xid messages."
    )]
    NoAnswer {
        /// The device, or the queried component.
        device: String,
        /// The time that the caller waited.
        waited: Duration,
    },
    /// The thread of an engine or a query has ended.
    #[error("The thread for {device} has stopped. Open the device again.")]
    Stopped {
        /// The device, or the queried component.
        device: String,
    },
    /// A copy is so late that the device counts as hung.
    #[error(
        "A copy on {device} did not end within {waited:?}: the device hangs. Look at the kernel's log for Xid messages, \
         and restart this process."
    )]
    Hangs {
        /// The engine's device.
        device: String,
        /// The time that the engine waited.
        waited: Duration,
    },
    /// The caller's stream is capturing a graph, in which an event does not show when work has ended.
    #[error(
        "The stream is being captured into a graph. Hand tensors over before the capture begins, or after it ends."
    )]
    Capturing,
    /// The per-thread default stream is a different stream on each thread, so it cannot be passed to the engine's
    /// thread.
    #[error(
        "The per-thread default stream cannot be passed to another thread. Use a stream of your own, or the legacy \
         default stream."
    )]
    PerThreadStream,
}

/// The driver's error for a refused call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DriverError {
    /// The called function.
    pub call: &'static str,
    /// The error code.
    pub code: u32,
    /// The code's name: `CUDA_ERROR_OUT_OF_MEMORY`.
    pub name: String,
    /// The driver's description.
    pub text: String,
}

impl DriverError {
    /// The message without the usual advice, for callers with advice of their own.
    pub(super) fn refusal(&self) -> String {
        let Self { call, code, name, text } = self;
        format!("The CUDA driver refused {call} with {name} ({code}): {text}.")
    }

    /// Advice for the user, if there is any.
    pub fn advice(&self) -> Option<&'static str> {
        Some(match self.code {
            2 => "Release memory of the device, or set smaller budgets.",
            3 | 4 => "The process is ending, or the driver was never initialised.",
            46 => "Another process uses the device exclusively: look at its compute mode with nvidia-smi.",
            201 | 709 => "Something in this process has reset the device or destroyed its primary context.",
            214 => "The device found an error in its memory: look at nvidia-smi -q -d ECC, and reset it.",
            700 | 702 | 710 | 714..=719 => {
                "A kernel or copy in this process broke the device's context: restart the process."
            }
            800 => "The system does not permit it: look at the container's device rules.",
            802 => "The system's GPU fabric is not ready: start nvidia-fabricmanager.",
            803 => {
                "The versions of the driver's kernel module and library differ: load the new module, or restart the machine."
            }
            999 => "Look at the kernel's log for Xid messages.",
            _ => return None,
        })
    }
}

impl fmt::Display for DriverError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.refusal())?;
        match self.advice() {
            Some(advice) => write!(f, " {advice}"),
            None => Ok(()),
        }
    }
}

impl std::error::Error for DriverError {}

/// Formats a number of devices.
struct Devices(usize);

impl fmt::Display for Devices {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            1 => write!(f, "one, cuda:0"),
            devices => write!(f, "{devices}, cuda:0 to cuda:{}", devices.saturating_sub(1)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_driver_error_says_what_to_do() {
        let error = DriverError {
            call: "cuMemAlloc_v2",
            code: 2,
            name: "CUDA_ERROR_OUT_OF_MEMORY".into(),
            text: "out of memory".into(),
        };
        assert_eq!(
            error.to_string(),
            "The CUDA driver refused cuMemAlloc_v2 with CUDA_ERROR_OUT_OF_MEMORY (2): out of memory. Release memory of \
             the device, or set smaller budgets."
        );
    }

    #[test]
    fn only_errors_that_break_a_context_ask_for_a_new_process() {
        let breaks = |code: &u32| {
            let error =
                DriverError { call: "cuEventQuery", code: *code, name: String::new(), text: String::new() };
            error.advice().is_some_and(|advice| advice.contains("restart the process"))
        };
        let breaking: Vec<u32> = (690..=730).filter(breaks).collect();
        assert_eq!(breaking, [700, 702, 710, 714, 715, 716, 717, 718, 719]);
    }

    #[test]
    fn a_missing_device_is_reported_with_the_visible_ones() {
        let message = |devices| CudaError::NoSuchDevice { ordinal: 7, devices }.to_string();
        assert_eq!(message(1), "There is no device cuda:7. This process sees one, cuda:0.");
        assert_eq!(message(4), "There is no device cuda:7. This process sees 4, cuda:0 to cuda:3.");
    }
}
