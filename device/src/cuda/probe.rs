use std::{
    error::Error,
    mem,
    sync::{
        Mutex, OnceLock, PoisonError,
        mpsc::{self, RecvTimeoutError},
    },
    thread,
    time::Duration,
};

use cudarc::driver::sys;

use super::{
    driver::{Driver, NO_DEVICE, STUB_LIBRARY},
    error::{CudaError, DriverError},
    symbols::Symbols,
    version::Version,
};

/// Finds the CUDA driver, once per process: loads its library, looks up every function used, and queries its version
/// and devices.
///
/// Never panics, and needs no CUDA at build time. The error says what is missing. Costs nothing without a library, and
/// some tens of milliseconds with one; later calls are free. Failures are retried at the next call.
pub fn probe() -> Result<Driver, CudaError> {
    match FOUND.get() {
        Some(driver) => Ok(*driver),
        None => ask_aside("the CUDA driver", find),
    }
}

static FOUND: OnceLock<Driver> = OnceLock::new();

/// Searches for the driver, one thread at a time: later ones share the result.
fn find() -> Result<Driver, CudaError> {
    static LOOKING: Mutex<()> = Mutex::new(());
    let _one_at_a_time = LOOKING.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(driver) = FOUND.get() {
        return Ok(*driver);
    }
    let driver = load()?;
    Ok(*FOUND.get_or_init(|| driver))
}

fn load() -> Result<Driver, CudaError> {
    // SAFETY: loading runs the library's own initialisers, which is what loading NVIDIA's driver is. A program that
    // has another libcuda.so in its search path has chosen to run that.
    if !unsafe { sys::is_culib_present() } {
        return Err(CudaError::NoLibrary { reason: why_no_library() });
    }
    // SAFETY: the library is there.
    let symbols = unsafe { Symbols::find() }.map_err(|symbol| CudaError::NoSymbol { symbol })?;
    // Nothing unloads a driver, so its functions are leaked with it: once per process, but for what fails below.
    let mut driver = Driver::new(Box::leak(Box::new(symbols)));
    let found = driver.ask_version().map_err(unusable)?;
    if found < Version::OLDEST {
        return Err(CudaError::DriverTooOld { found });
    }
    driver.init().map_err(unusable)?;
    let devices = driver.ask_devices()?;
    (devices > 0).then_some(driver).ok_or(CudaError::NoDevice)
}

/// Explains why a driver refuses the first calls.
fn unusable(error: DriverError) -> CudaError {
    match error.code {
        STUB_LIBRARY => CudaError::Stub,
        NO_DEVICE => CudaError::NoDevice,
        _ => CudaError::Driver(error),
    }
}

/// The loader's reason why there is no driver.
fn why_no_library() -> String {
    // SAFETY: as for every attempt before, which found nothing to run; this one is made for its message.
    match unsafe { libloading::Library::new("libcuda.so.1") } {
        Ok(library) => {
            mem::forget(library); // It came this very moment. A driver is never unloaded.
            "it has only just appeared".into()
        }
        // The loader's own words are in the source.
        Err(error) => error.source().map_or_else(|| error.to_string(), ToString::to_string),
    }
}

/// Runs a driver query on a thread of its own, so that a driver that never answers does not block the caller.
pub(super) fn ask_aside<T: Send + 'static>(
    whom: &str,
    question: impl FnOnce() -> Result<T, CudaError> + Send + 'static,
) -> Result<T, CudaError> {
    let (reply, answer) = mpsc::sync_channel(1);
    thread::Builder::new()
        .name("relay-look".into())
        .spawn(move || reply.send(question()))
        .map_err(|error| CudaError::NoThread { device: whom.into(), reason: error.to_string() })?;
    let waited = ANSWER_TIMEOUT;
    answer.recv_timeout(waited).unwrap_or_else(|missing| {
        let device = whom.into();
        Err(match missing {
            RecvTimeoutError::Timeout => CudaError::NoAnswer { device, waited },
            RecvTimeoutError::Disconnected => CudaError::Stopped { device },
        })
    })
}

/// The deadline of such a query. Loading the driver or making a context takes seconds at most, unless a device is in
/// trouble.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_probe_never_panics_and_says_what_is_missing() {
        // Machines that build this have no GPU, as a rule: then the error says so. With one, there is a device.
        for _ in 0..2 {
            match probe() {
                Ok(driver) => assert!(driver.devices() > 0 && driver.version() >= Version::OLDEST),
                Err(error) => assert!(error.to_string().len() > 40, "{error}"),
            }
        }
    }
}
