use crate::Lock;
use std::{
    error::Error,
    mem,
    sync::{
        OnceLock,
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

/// Finds the CUDA driver, once per process: loads its library, finds every function used, and queries its version and
/// devices.
///
/// Never panics, and needs no CUDA at build time. The error says what is missing. Takes some tens of milliseconds if
/// there is a driver; later calls are free. After a failure, the next call tries again.
pub fn probe() -> Result<Driver, CudaError> {
    match FOUND.get() {
        Some(driver) => Ok(*driver),
        None => query_aside("the CUDA driver", find),
    }
}

static FOUND: OnceLock<Driver> = OnceLock::new();

/// Finds the driver, on one thread at a time: later threads share the result.
fn find() -> Result<Driver, CudaError> {
    static SEARCH: Lock<()> = Lock::new(());
    let _lock = SEARCH.lock();
    if let Some(driver) = FOUND.get() {
        return Ok(*driver);
    }
    let driver = load()?;
    Ok(*FOUND.get_or_init(|| driver))
}

fn load() -> Result<Driver, CudaError> {
    // SAFETY: loading runs the library's initialisers, as every program that loads NVIDIA's driver does. Whoever put
    // another libcuda.so into the search path has chosen to run its code.
    if !unsafe { sys::is_culib_present() } {
        return Err(CudaError::NoLibrary { reason: why_no_library() });
    }
    // SAFETY: the library was found just above.
    let symbols = unsafe { Symbols::find() }.map_err(|symbol| CudaError::NoSymbol { symbol })?;
    // A driver is never unloaded, so the table of its functions is leaked: once per process, and once for each failure
    // below.
    let mut driver = Driver::new(Box::leak(Box::new(symbols)));
    let found = driver.query_version().map_err(unusable)?;
    if found < Version::OLDEST {
        return Err(CudaError::DriverTooOld { found });
    }
    driver.init().map_err(unusable)?;
    let device_count = driver.query_device_count()?;
    (device_count > 0).then_some(driver).ok_or(CudaError::NoDevice)
}

/// The error for a driver that refuses its first calls.
fn unusable(error: DriverError) -> CudaError {
    match error.code {
        STUB_LIBRARY => CudaError::Stub,
        NO_DEVICE => CudaError::NoDevice,
        _ => CudaError::Driver(error),
    }
}

/// The loader's message about the missing library.
fn why_no_library() -> String {
    // SAFETY: as in `load`, which has found no library; this attempt is made for its error message.
    match unsafe { libloading::Library::new("libcuda.so.1") } {
        Ok(library) => {
            mem::forget(library); // The library was installed meanwhile. A driver is never unloaded.
            "it has only just appeared".into()
        }
        // The loader's own message is in the error's source.
        Err(error) => error.source().map_or_else(|| error.to_string(), ToString::to_string),
    }
}

/// Runs a driver query on a separate thread, so that a driver that never answers does not block the caller for ever.
/// `name` is the queried component, for errors.
pub(super) fn query_aside<T: Send + 'static>(
    name: &str,
    query: impl FnOnce() -> Result<T, CudaError> + Send + 'static,
) -> Result<T, CudaError> {
    let (reply, answer) = mpsc::sync_channel(1);
    thread::Builder::new()
        .name("relay-look".into())
        .spawn(move || reply.send(query()))
        .map_err(|error| CudaError::NoThread { device: name.into(), reason: error.to_string() })?;
    let waited = ANSWER_TIMEOUT;
    answer.recv_timeout(waited).unwrap_or_else(|missing| {
        let device = name.into();
        Err(match missing {
            RecvTimeoutError::Timeout => CudaError::NoAnswer { device, waited },
            RecvTimeoutError::Disconnected => CudaError::Stopped { device },
        })
    })
}

/// The deadline of a query. Loading the driver or creating a context takes seconds at most, unless a device has a
/// problem.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_probe_never_panics_and_says_what_is_missing() {
        // Usually the tests run without a GPU; then the error says what is missing.
        for _ in 0..2 {
            match probe() {
                Ok(driver) => assert!(driver.device_count() > 0 && driver.version() >= Version::OLDEST),
                Err(error) => assert!(error.to_string().len() > 40, "{error}"),
            }
        }
    }
}
