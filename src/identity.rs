//! The identity of a shared object, compared by address without accessing the object.

use std::sync::Arc;

/// The address of an `Arc`'s object. Two are equal if both are of the same object or of none; while the
/// objects of both are alive, they are not equal otherwise.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Identity(usize);

impl Identity {
    /// The identity of no object.
    #[cfg(all(test, not(loom)))]
    pub(crate) const NONE: Identity = Identity(0);

    #[inline]
    pub(crate) fn of<T>(object: &Arc<T>) -> Identity {
        Identity(Arc::as_ptr(object).addr())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clones_of_an_arc_have_one_identity() {
        let (one, other) = (Arc::new(7), Arc::new(7));
        assert_eq!(Identity::of(&one), Identity::of(&one.clone()));
        assert_ne!(Identity::of(&one), Identity::of(&other));
        assert_ne!(Identity::of(&one), Identity::default());
    }
}
