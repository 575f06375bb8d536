//! SCSI commands, sense data, VPD and mode pages; pure.
