//! The engine's thread: the only thread that calls the driver for an engine.
//!
//! Why one thread: a context is bound to threads, some driver calls block others, and destructors must not call a
//! driver. So this thread owns the driver's objects, and all other threads send it commands through an inbox.

use crate::Lock;
use std::{
    io,
    sync::{
        Arc, Condvar, MutexGuard, PoisonError,
        mpsc::{self, Receiver, RecvTimeoutError},
    },
    thread,
    time::{Duration, Instant},
};

use super::{
    copies::Copies,
    devices::DeviceInfo,
    driver::Driver,
    error::CudaError,
    fences::Fences,
    gpu::Gpu,
    holdings::Holdings,
    inbox::{Command, Inbox, Reply},
    options::CudaOptions,
    setting::Setting,
    share::Exported,
    shares::Shares,
    stats::Counters,
    waiters::Waiters,
};
use crate::id::Id;

/// The result of starting an engine's thread.
pub(super) struct Started {
    pub(super) info: DeviceInfo,
    pub(super) inbox: Inbox,
    pub(super) counters: Arc<Counters>,
    pub(super) waiters: Waiters,
}

/// Starts the thread of an engine, and waits up to `answer_timeout` until it has opened the device.
pub(super) fn start(
    driver: Driver,
    ordinal: usize,
    engine: Id,
    options: &CudaOptions,
) -> Result<Started, CudaError> {
    let device: Arc<str> = format!("cuda:{ordinal}").into();
    let no_thread =
        |error: io::Error| CudaError::NoThread { device: device.to_string(), reason: error.to_string() };
    // Longer than the thread itself waits for any copy.
    let timeout = options.fence_timeout + 2 * options.copy_timeout;
    let waiters = Waiters::watch(Arc::clone(&device), timeout).map_err(no_thread)?;
    let (sender, commands) = mpsc::channel();
    let inbox = Inbox::new(sender, Arc::clone(&device), options.answer_timeout);
    let counters = Arc::new(Counters::default());
    let (reply, answer) = mpsc::sync_channel(1);
    let setting =
        Setting { engine, options: options.clone(), inbox: inbox.clone(), counters: Arc::clone(&counters) };
    thread::Builder::new()
        .name(format!("relay-{device}"))
        .spawn(move || run(driver, ordinal, setting, &commands, &reply))
        .map_err(no_thread)?;
    let waited = options.answer_timeout;
    let opened = answer.recv_timeout(waited).unwrap_or_else(|missing| {
        let device = device.to_string();
        Err(match missing {
            RecvTimeoutError::Timeout => CudaError::NoAnswer { device, waited },
            RecvTimeoutError::Disconnected => CudaError::Stopped { device },
        })
    });
    if opened.is_err() {
        // If the device opens later, the thread must end, since nobody will use it.
        let _ = inbox.send(Command::Close);
    }
    opened.map(|info| Started { info, inbox, counters, waiters })
}

fn run(
    driver: Driver,
    ordinal: usize,
    setting: Setting,
    commands: &Receiver<Command>,
    reply: &Reply<Result<DeviceInfo, CudaError>>,
) {
    let _running = RunningThread::register();
    let info = DeviceInfo::query(&driver, ordinal);
    match info.and_then(|info| Ok((Gpu::open(driver, ordinal, &setting.inbox)?, info))) {
        Ok((gpu, info)) => {
            // If the caller has stopped waiting, `Close` is in the inbox.
            let _ = reply.send(Ok(info));
            Worker::new(gpu, setting).run(commands);
        }
        Err(error) => {
            let _ = reply.send(Err(error));
        }
    }
}

/// The thread's state: the device and its pending work.
///
/// If the thread panics, dropping this frees nothing that the device may still use: slots and memory of copies in
/// flight are leaked, and no destructor here calls the driver.
struct Worker {
    gpu: Gpu,
    setting: Setting,
    copies: Copies,
    fences: Fences,
    holdings: Holdings,
    shares: Shares,
    /// The error with which the device failed. Later requests that need the device are refused with it.
    failed: Option<CudaError>,
    /// The time when the engine was dropped, and `Command::Close` arrived.
    closed: Option<Instant>,
}

impl Worker {
    fn new(gpu: Gpu, setting: Setting) -> Self {
        let copies = Copies::new(&setting.options);
        let holdings = Holdings::new(&setting.options);
        let (fences, shares) = (Fences::default(), Shares::new(&setting.options));
        Self { gpu, setting, copies, fences, holdings, shares, failed: None, closed: None }
    }

    fn run(mut self, commands: &Receiver<Command>) {
        while !self.is_done() {
            if let Some(command) = self.next(commands) {
                self.handle(command);
            }
            // Up to `BATCH_MAX` further commands are handled before the device is polled.
            commands.try_iter().take(BATCH_MAX).for_each(|command| self.handle(command));
            self.poll(Instant::now());
        }
        self.end();
    }

    /// Waits for a command, or for the next time to poll.
    fn next(&self, commands: &Receiver<Command>) -> Option<Command> {
        match self.wake_at() {
            Some(at) => commands.recv_timeout(at.saturating_duration_since(Instant::now())).ok(),
            // This thread holds a sender itself (`setting.inbox`), so the channel does not close.
            None => commands.recv().ok(),
        }
    }

    fn wake_at(&self) -> Option<Instant> {
        // Once the engine is dropped, memory that waits for a caller's stream has a deadline, after which the next poll
        // leaks it. Open fences have a deadline too (`is_done`), but it stays after it has passed, and would then keep
        // this thread awake for as long as memory is held. It is left out: open fences are polled often anyway.
        let last = self.closed.and_then(|_| self.holdings.wake_at());
        let all = [self.copies.wake_at(), self.fences.wake_at(), self.shares.wake_at(), last];
        all.into_iter().flatten().min()
    }

    fn handle(&mut self, command: Command) {
        let Self { gpu, setting, copies, fences, holdings, shares, failed, .. } = self;
        match command {
            Command::Copy(job) => match failed {
                Some(error) => copies.refuse(job, error, setting),
                None => copies.start(job, gpu, holdings, setting),
            },
            Command::Signal(direction) => {
                setting.counters.signals.add(1);
                copies.signal(direction);
            }
            Command::Allocate(len, reply) => {
                // Memory returned before this request is freed first.
                holdings.poll(Instant::now(), gpu, setting, failed.is_some(), false);
                let memory = holdings.allocate(len, gpu, setting, failed.as_ref());
                let _ = reply.send(memory); // If the caller has stopped waiting, the memory is dropped and returns.
            }
            Command::Lock(len, reply) => {
                let locked = holdings.allocate_page_locked(len, gpu, setting, failed.as_ref());
                let _ = reply.send(locked);
            }
            Command::Buffer(len, reply) => {
                holdings.poll(Instant::now(), gpu, setting, failed.is_some(), false);
                let buffer = match failed {
                    Some(error) => Err(error.clone().into()),
                    None => holdings.buffer(len, gpu, setting),
                };
                let _ = reply.send(buffer); // As above.
            }
            Command::OpenableBuffer(len, reply) => {
                holdings.poll(Instant::now(), gpu, setting, failed.is_some(), false);
                let buffer = match failed {
                    Some(error) => Err(error.clone().into()),
                    None => holdings.openable_buffer(len, gpu, setting),
                };
                let _ = reply.send(buffer); // As above.
            }
            Command::Import(exported, reply) => {
                let imported = match (failed, &exported) {
                    (Some(error), _) => Err(error.clone().into()),
                    (None, Exported::Fd(shared)) => holdings.import_fd(shared, gpu, setting),
                    (None, Exported::Ipc(shared)) => holdings.import_ipc(shared, gpu, setting),
                };
                let _ = reply.send(imported); // As above.
            }
            Command::Share(request) => match failed {
                Some(error) => request.refuse(error.clone().into()),
                None => shares.start(request, gpu, setting),
            },
            Command::TakeBack(owner, fences) => holdings.take_back(owner, fences),
            Command::ReleaseAfter(memory, streams) => {
                for stream in streams {
                    let fence = match failed {
                        Some(error) => Err(error.clone()),
                        None => fences.record(&stream, gpu, setting),
                    };
                    // If a stream's progress is unknown, the memory is leaked.
                    memory.add_fence(fence.unwrap_or_else(|error| fences.failed(error, setting)));
                }
            }
            Command::Unlock(mapping) => holdings.unlock(mapping, gpu, setting, failed.is_some()),
            Command::Fence(stream, reply) => {
                let fence = match failed {
                    Some(error) => Err(error.clone()),
                    None => fences.record(&stream, gpu, setting),
                };
                let _ = reply.send(fence);
            }
            Command::Intake(reply) => {
                let intake = match failed {
                    Some(error) => Err(error.clone()),
                    None => gpu.intake().map(|stream| stream.expose_provenance()).map_err(CudaError::from),
                };
                let _ = reply.send(intake);
            }
            Command::FenceIntake(reply) => {
                let fence = match failed {
                    Some(error) => Err(error.clone()),
                    None => fences.record_intake(gpu, setting),
                };
                let _ = reply.send(fence);
            }
            Command::WaitFence(id, stream, reply) => {
                let result = match failed {
                    Some(error) => Err(error.clone()),
                    None => fences.make_wait(id, &stream, gpu),
                };
                let _ = reply.send(result);
            }
            Command::DropFence(id) => fences.drop_fence(id, gpu),
            Command::WaitMemory(memory, stream, reply) => match failed {
                Some(error) => {
                    let _ = reply.send(Err(error.clone()));
                }
                None => copies.add_stream_wait(memory, stream, reply),
            },
            Command::Close => self.closed = Some(Instant::now()),
        }
    }

    /// Polls fences, copies, exports and returned memory, and handles their deadlines.
    fn poll(&mut self, now: Instant) {
        let Self { gpu, setting, copies, fences, holdings, shares, failed, closed } = self;
        if fences.poll(now, gpu) {
            copies.suspect();
        }
        if failed.is_none() {
            copies.start_waiting(now, gpu, holdings, setting);
            let polled = copies.poll(now, gpu, setting);
            if let Err(error) = polled.and_then(|()| shares.poll(now, gpu, setting)) {
                // Set only here, and once.
                let _ = setting.counters.failure.set(error.clone());
                *failed = Some(error);
            }
        }
        if let Some(error) = failed {
            copies.fail(error, gpu, setting);
            shares.fail(error, gpu, setting);
            fences.fail(error);
        }
        copies.make_streams_wait(gpu);
        holdings.poll(now, gpu, setting, failed.is_some(), closed.is_some());
    }

    /// Whether the engine was dropped, all copies and exports have ended, all memory given out is returned, and no
    /// fence is open. Fences are waited for up to `last_wait`; after a device failure, neither memory nor fences are.
    fn is_done(&self) -> bool {
        let Some(closed) = self.closed else { return false };
        let fenced = !self.fences.is_empty() && closed.elapsed() < self.setting.options.last_wait();
        let all_back = self.holdings.are_returned() && !fenced;
        self.copies.are_done() && self.shares.are_done() && (self.failed.is_some() || all_back)
    }

    /// Releases the device. If the device failed, or memory was leaked, the context is leaked too, since the memory may
    /// be in use.
    fn end(self) {
        let Self { gpu, setting, holdings, failed, .. } = self;
        if failed.is_none() && holdings.free_cached(&gpu, &setting) {
            gpu.close();
        }
    }
}

/// The most commands handled between two polls, besides the one that woke the thread.
const BATCH_MAX: usize = 256;

/// Waits until the threads of all engines of this process have ended; returns whether they ended within `timeout`.
///
/// For the end of a program: an engine's thread releases the device after the engine is dropped, and if the process
/// exits before that, the driver has to clean up.
pub fn all_closed(timeout: Duration) -> bool {
    let until = Instant::now() + timeout;
    let mut open = RunningThread::lock_count();
    loop {
        let left = until.saturating_duration_since(Instant::now());
        if *open == 0 || left.is_zero() {
            return *open == 0;
        }
        let waited = ENDED.wait_timeout(open, left);
        open = waited.unwrap_or_else(PoisonError::into_inner).0;
    }
}

/// Counts an engine's thread from its start to its end.
struct RunningThread;

static RUNNING: Lock<usize> = Lock::new(0);
static ENDED: Condvar = Condvar::new();

impl RunningThread {
    fn register() -> Self {
        *Self::lock_count() += 1;
        Self
    }

    fn lock_count() -> MutexGuard<'static, usize> {
        RUNNING.lock()
    }
}

impl Drop for RunningThread {
    fn drop(&mut self) {
        *Self::lock_count() -= 1;
        ENDED.notify_all();
    }
}
