//! Changes of the network of a fabric while it runs.

use crate::fabric::{Fabric, FabricError, check_network};
use crate::faults::Device;
use crate::kernel::Kernel;
use std::fmt;
use std::sync::Arc;
use uverbs_connectx::network::{Network, PacketFault, Traffic};

impl Fabric {
    /// Changes the network between all devices, as [`Device::set_network_to`] does from one to another.
    ///
    /// # Errors
    ///
    /// A share of the network is not between 0 and 1, or its bandwidth is 0.
    pub fn set_network(&self, network: Network) -> Result<(), FabricError> {
        let network = check_network(network)?;
        let fault = |_: &Kernel| "the network between all devices changes".to_owned();
        self.change(fault, |kernel| kernel.switch.set_network(network));
        Ok(())
    }

    /// Partitions the network: these devices and the others do not reach each other any more, by packets of queue
    /// pairs, by messages of the connection manager, and by what is under way. Another partition takes the place of
    /// this one, and of what is [cut off](Device::cut_off).
    ///
    /// # Panics
    ///
    /// If a device is one of another fabric.
    pub fn partition<'d>(&self, from_others: impl IntoIterator<Item = &'d Device>) {
        let mut side = Vec::new();
        for device in from_others {
            assert!(Arc::ptr_eq(&self.world, &device.world), "a device of another fabric");
            side.push(device.number);
        }
        let fault = |kernel: &Kernel| {
            let names = side.iter().map(|device| &*kernel.drivers[*device].name);
            match side.is_empty() {
                true => "the network is whole".to_owned(),
                false => format!("partition: {}", names.collect::<Vec<_>>().join(", ")),
            }
        };
        self.change(fault, |kernel| {
            for from in 0..kernel.drivers.len() {
                for to in 0..kernel.drivers.len() {
                    kernel.cut_off(from, to, side.contains(&from) != side.contains(&to));
                }
            }
        });
    }

    /// Changes all of the network. The history of each device has a line of it.
    fn change(&self, fault: impl FnOnce(&Kernel) -> String, change: impl FnOnce(&mut Kernel)) {
        let now = self.world.nanoseconds();
        self.world.disturb(|kernel| {
            let fault = fault(kernel);
            for device in 0..kernel.drivers.len() {
                kernel.note_fault(now, device, format_args!("{fault}"));
            }
            change(kernel);
        });
    }

    /// Ends a [partition](Self::partition), and all that is [cut off](Device::cut_off).
    pub fn heal(&self) {
        self.partition([]);
    }
}

impl Device {
    /// Changes the network from this device to another; [`Fabric::set_network`] changes all. A packet that is
    /// under way arrives when it would have, or when it would if it were sent now, whichever is sooner: later ones do
    /// not overtake it, unless the network reorders.
    ///
    /// # Errors
    ///
    /// A share of the network is not between 0 and 1, or its bandwidth is 0.
    ///
    /// # Panics
    ///
    /// If the other device is one of another fabric, or this one.
    pub fn set_network_to(&self, to: &Device, network: Network) -> Result<(), FabricError> {
        let network = check_network(network)?;
        self.change_way(to, "changes", |switch, from, to| switch.set_way(from, to, network));
        Ok(())
    }

    /// Lets a fault happen to packets of queue pairs from this device to another: those that leave from now on.
    ///
    /// # Panics
    ///
    /// If the other device is one of another fabric, or this one.
    pub fn fault_packets(&self, to: &Device, fault: PacketFault) {
        let how = fault.to_string();
        self.change_way(to, how, |switch, from, to| switch.fault_packets(from, to, fault));
    }

    /// Lets nothing of this device arrive at another any more, in this direction: no packet of a queue pair, no message
    /// of the connection manager, and nothing that is under way. [`Fabric::heal`] ends it.
    ///
    /// # Panics
    ///
    /// If the other device is one of another fabric, or this one.
    pub fn cut_off(&self, to: &Device) {
        self.change_way(to, "is cut", |switch, from, to| switch.cut_off(from, to, true));
    }

    /// The packets of queue pairs that went from this device to another: 0 before there is a [`Network`].
    ///
    /// # Panics
    ///
    /// If the other device is one of another fabric.
    pub fn traffic_to(&self, to: &Device) -> Traffic {
        assert!(Arc::ptr_eq(&self.world, &to.world), "a device of another fabric");
        let kernel = self.world.kernel();
        kernel.map_or_else(|_| Traffic::default(), |kernel| kernel.traffic(self.number, to.number))
    }

    fn change_way(
        &self,
        to: &Device,
        how: impl fmt::Display,
        change: impl FnOnce(&mut uverbs_connectx::fabric::Fabric, usize, usize),
    ) {
        assert!(Arc::ptr_eq(&self.world, &to.world), "a device of another fabric");
        assert!(self.number != to.number, "packets of a device to itself do not leave it");
        let name = {
            let kernel = self.world.kernel();
            kernel.map_or_else(|_| String::new(), |kernel| kernel.drivers[to.number].name.clone())
        };
        self.disturb(format_args!("the network to {name} {how}"), |kernel| {
            let [from, to] = [self.number, to.number].map(|at| kernel.drivers[at].function());
            change(&mut kernel.switch, from, to);
        });
    }
}
