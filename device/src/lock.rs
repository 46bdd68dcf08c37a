use std::sync::{Mutex, MutexGuard, PoisonError};

/// A mutex that stays usable after a panic of a thread that held it. For data that no panic under the lock can leave
/// inconsistent: each change is a single step, or only counts.
#[derive(Debug, Default)]
pub struct Lock<T: ?Sized>(Mutex<T>);

impl<T> Lock<T> {
    /// An unlocked mutex.
    pub const fn new(content: T) -> Self {
        Self(Mutex::new(content))
    }

    /// The content, which nobody else can lock any more.
    pub fn into_inner(self) -> T {
        self.0.into_inner().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T: ?Sized> Lock<T> {
    /// Waits for the content. Must not be called by a thread that holds it.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
