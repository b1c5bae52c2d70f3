{{- define "cpd.labels" -}}
app.kubernetes.io/name: cpd
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- /* Labels that select all pods of this cluster. */ -}}
{{- define "cpd.all" -}}
app.kubernetes.io/name: cpd
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- /* Settings that routers and workers share. */ -}}
{{- define "cpd.settings" -}}
cluster: {{ .Release.Namespace }}-{{ .Release.Name }}
model: {{ .Values.model.path | quote }}
secret-file: /run/cpd/secret/cluster
drain-s: {{ .Values.drainSeconds }}
{{- with .Values.settings }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "cpd.routerSettings" -}}
{{ include "cpd.settings" . }}
port: 8000
admin-port: 9000
{{- if .Values.apiKeys }}
api-key-file: /run/cpd/secret/api-keys.yaml
{{- end }}
{{- if .Values.tlsSecret }}
tls-cert: /run/cpd/tls/tls.crt
tls-key: /run/cpd/tls/tls.key
{{- end }}
{{- with .Values.routers.settings }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "cpd.workerSettings" -}}
{{ include "cpd.settings" . }}
port: 9001
session-port: 9002
{{- with .Values.workers.settings }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- /* Not empty if a planner runs. YAML reads off without quotes as false. */ -}}
{{- define "cpd.plans" -}}
{{- if has (toString .Values.planner) (list "advise" "act") }}yes{{ end }}
{{- end }}

{{- define "cpd.plannerSettings" -}}
cluster: {{ .Release.Namespace }}-{{ .Release.Name }}
secret-file: /run/cpd/secret/cluster
planner: {{ .Values.planner }}
{{- with pick .Values.settings "log-level" "log-format" }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- /* Environment of every router and worker, with the name of the setting for its id. */ -}}
{{- define "cpd.environment" -}}
- name: {{ .id }}
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
- name: CPD_HOST
  value: {{ .root.Values.host | quote }}
- name: CPD_ADVERTISE_HOST
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- name: CPD_REDIS_URL
  valueFrom: {secretKeyRef: {name: {{ .root.Values.secret }}, key: redis-url}}
{{- end }}

{{- /* Fields of every pod. */ -}}
{{- define "cpd.pod" -}}
automountServiceAccountToken: false
enableServiceLinks: false  # a Service named cpd would set CPD_PORT, which is a setting
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001  # may read the Secret's files
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "cpd.all" .root | nindent 8 }}
        app.kubernetes.io/component: {{ .component }}
{{- with .more }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "cpd.mounts" -}}
- {name: config, mountPath: /run/cpd/config, readOnly: true}
- {name: secret, mountPath: /run/cpd/secret, readOnly: true}
{{- if .Values.model.volume }}
- {name: models, mountPath: /models, readOnly: true}
{{- end }}
{{- end }}
