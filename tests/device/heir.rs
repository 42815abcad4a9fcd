//! Taking over an object that another process made, and destroying it in its place.

use uverbs::{ErrorWith, ForeignObject, Importable, Imported};

/// Takes ownership of an import whose owner released it, or left it behind when it ended. A test
/// with two owners of one object makes no other object until both are done with it.
#[allow(unsafe_code, reason = "the test promises that there is no other owner")]
pub(crate) fn take_over<T: Importable>(imported: Imported<T>) -> Result<T, ErrorWith<Imported<T>>> {
    // SAFETY: there is no other owner, or no object is made on the file as long as there is one.
    unsafe { imported.into_owner() }
}

/// Destroys an object of another process. If that process is still there, nothing else is made on
/// the file until it has dropped its own.
#[allow(unsafe_code, reason = "the test promises that no owner relies on it")]
pub(crate) fn destroy(object: ForeignObject) -> Result<(), ErrorWith<ForeignObject>> {
    // SAFETY: there is no owner, or no object is made on the file as long as there is one.
    unsafe { object.destroy() }
}
